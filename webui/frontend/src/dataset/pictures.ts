/** The pictures of one camera in one episode: fetched when they are wanted, a few ahead, some kept. */

const AHEAD = 4;
const KEPT = 64;

export class Pictures {
  private readonly kept = new Map<number, ImageBitmap>();
  private wanted = 0;
  private isLoading = false;
  private isClosed = false;

  /** `draw` is given each picture that was wanted, with its frame. */
  constructor(
    private readonly folder: string,
    private readonly numFrames: number,
    private readonly draw: (image: ImageBitmap, frame: number) => void,
    private readonly fail: (reason: string) => void,
  ) {}

  show(frame: number): void {
    this.wanted = frame;
    const image = this.kept.get(frame);
    if (image) this.draw(image, frame);
    void this.load();
  }

  close(): void {
    this.isClosed = true;
    for (const image of this.kept.values()) image.close();
    this.kept.clear();
  }

  private async load(): Promise<void> {
    if (this.isLoading) return;
    this.isLoading = true;
    try {
      for (let frame = this.missing(); frame !== null && !this.isClosed; frame = this.missing()) {
        const isWanted = frame === this.wanted;
        const image = await this.fetch(frame);
        if (this.isClosed) {
          image.close();
          return;
        }
        // Of a connection that is slower than the clock every picture is late, and shown nevertheless.
        if (isWanted || frame === this.wanted) this.draw(image, frame);
        this.keep(frame, image);
      }
    } catch (error) {
      if (!this.isClosed) this.fail(error instanceof Error ? error.message : String(error));
    } finally {
      this.isLoading = false;
    }
  }

  /** The wanted frame first, then those that a step or the clock comes to next. */
  private missing(): number | null {
    const near = [0, 1, -1, ...Array.from({ length: AHEAD - 1 }, (_, i) => i + 2)];
    const frames = near.map((delta) => this.wanted + delta);
    return frames.find((frame) => frame >= 0 && frame < this.numFrames && !this.kept.has(frame)) ?? null;
  }

  private async fetch(frame: number): Promise<ImageBitmap> {
    const response = await fetch(`${this.folder}/${frame}.png`);
    if (!response.ok) throw new Error(((await response.json()) as { detail: string }).detail);
    return createImageBitmap(await response.blob(), { colorSpaceConversion: "none" });
  }

  private keep(frame: number, image: ImageBitmap): void {
    this.kept.set(frame, image);
    if (this.kept.size <= KEPT) return;
    const farthest = [...this.kept.keys()].reduce((a, b) => (Math.abs(b - this.wanted) > Math.abs(a - this.wanted) ? b : a));
    this.kept.get(farthest)?.close();
    this.kept.delete(farthest);
  }
}
