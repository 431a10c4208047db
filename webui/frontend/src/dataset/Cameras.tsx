/** The cameras of the episode, pixel for pixel as they are in the dataset. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { Pictures } from "./pictures";
import { episode, frame, numFrames, overview, problem } from "./store";

export function Cameras() {
  const cameras = overview.value?.cameras ?? [];
  if (!episode.value) return null;
  const number = episode.value.line.episode;
  return (
    <section class="panel cameras" aria-label="Cameras">
      {cameras.map((camera) => (
        <CameraView key={`${number}/${camera}`} camera={camera} number={number} />
      ))}
      {cameras.length === 0 ? <p class="empty">This dataset has no videos.</p> : null}
    </section>
  );
}

function CameraView({ camera, number }: { camera: string; number: number }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const pictures = useRef<Pictures | null>(null);
  const drawn = useSignal<number | null>(null);
  const wanted = frame.value;

  useEffect(() => {
    const draw = (image: ImageBitmap, of: number) => {
      const target = canvas.current;
      if (!target) return;
      if (target.width !== image.width) target.width = image.width;
      if (target.height !== image.height) target.height = image.height;
      target.getContext("2d")?.drawImage(image, 0, 0);
      drawn.value = of;
    };
    const folder = `/dataset/episodes/${number}/pictures/${encodeURIComponent(camera)}`;
    const source = new Pictures(folder, numFrames.value, draw, (reason) => (problem.value = reason));
    pictures.current = source;
    return () => source.close();
  }, []);
  useEffect(() => pictures.current?.show(wanted), [wanted]);

  const isAsRecorded = episode.value?.as_recorded[camera] ?? null;
  return (
    <figure class="camera">
      <canvas ref={canvas} width={256} height={256} role="img" aria-label={camera} data-frame={drawn.value ?? ""} />
      <figcaption>
        <b>{camera.replace("observation.images.", "")}</b>
        <span class="tile-frame">{drawn.value === null ? "" : `frame ${drawn.value}`}</span>
        {isAsRecorded === null ? null : isAsRecorded ? (
          <span class="hash" title="The first and the last picture of this episode have the hashes that the recording kept of them">
            hash ✓
          </span>
        ) : (
          <span class="hash problem" role="alert">
            first or last picture is not the one recorded
          </span>
        )}
      </figcaption>
    </figure>
  );
}
