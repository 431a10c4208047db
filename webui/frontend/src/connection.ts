/** The one websocket: questions with answers, wishes with pictures. Connects again by itself. */

import { CAMERAS, type Camera, type Changes, type Reply, type Shown } from "./types";

export interface Picture {
  readonly robot: number;
  readonly camera: Camera;
  readonly seek: number;
  readonly t: number;
  readonly jpeg: Blob;
}

export interface Wish {
  seek: number;
  t: number | null;
  exact_robot: string | null;
  tiles: [string, Camera[]][];
  boards: Record<string, number>;
}

export interface Listener {
  connected(): void;
  disconnected(): void;
  picture(picture: Picture): void;
  changes(changes: Changes): void;
  shown(shown: Shown): void;
}

const HEADER_BYTES = 16;
const RECONNECT_MS = 1000;

export function readPicture(data: ArrayBuffer): Picture {
  const view = new DataView(data);
  return {
    camera: CAMERAS[view.getUint8(1)] ?? "agentview",
    robot: view.getUint16(2, true),
    seek: view.getUint32(4, true),
    t: view.getFloat64(8, true),
    jpeg: new Blob([new Uint8Array(data, HEADER_BYTES)], { type: "image/jpeg" }),
  };
}

export class Connection {
  private socket: WebSocket | null = null;
  private nextId = 1;
  private readonly pending = new Map<number, { resolve(body: unknown): void; reject(error: Error): void }>();

  constructor(
    private readonly url: string,
    private readonly listener: Listener,
  ) {
    this.connect();
  }

  get isOpen(): boolean {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  /** The answer to a question; rejects with the server's one line. */
  ask<T>(type: string, fields: Record<string, unknown> = {}): Promise<T> {
    const id = this.nextId++;
    return new Promise<T>((resolve, reject) => {
      if (!this.isOpen) {
        reject(new Error("not connected"));
        return;
      }
      this.pending.set(id, { resolve: resolve as (body: unknown) => void, reject });
      this.socket?.send(JSON.stringify({ type, id, ...fields }));
    });
  }

  wish(wish: Wish): void {
    if (this.isOpen) this.socket?.send(JSON.stringify({ type: "wish", ...wish }));
  }

  private connect(): void {
    const socket = new WebSocket(this.url);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => this.listener.connected();
    socket.onmessage = ({ data }) => this.take(data as string | ArrayBuffer);
    socket.onclose = () => {
      for (const { reject } of this.pending.values()) reject(new Error("the connection was lost"));
      this.pending.clear();
      this.listener.disconnected();
      setTimeout(() => this.connect(), RECONNECT_MS);
    };
    this.socket = socket;
  }

  private take(data: string | ArrayBuffer): void {
    if (typeof data !== "string") {
      this.listener.picture(readPicture(data));
      return;
    }
    const message = JSON.parse(data) as Reply | Changes | Shown;
    switch (message.type) {
      case "reply": {
        if (message.id === 0) console.error(message.error); // a mistake of the page itself
        const waiting = this.pending.get(message.id);
        this.pending.delete(message.id);
        if (message.error !== null) waiting?.reject(new Error(message.error));
        else waiting?.resolve(message.body);
        break;
      }
      case "changes":
        this.listener.changes(message);
        break;
      case "shown":
        this.listener.shown(message);
        break;
    }
  }
}
