/** The cameras: both of a few robots, one of many (the selected robot has both, larger). */

import { useEffect, useRef } from "preact/hooks";
import { useComputed } from "@preact/signals";
import {
  boards,
  knownTiles,
  registerCanvas,
  robots,
  run,
  selectedRobot,
  shown,
  visibleTiles,
  running,
  clock,
} from "../store";
import { type Camera, CAMERAS } from "../types";

const BOTH_CAMERAS_UP_TO = 4;

export function Tiles() {
  const names = robots.value;
  const isFew = names.length <= BOTH_CAMERAS_UP_TO;
  const selected = selectedRobot.value;
  return (
    <section class="panel tiles" aria-label="Cameras" key={run.value?.run}>
      <div class={`tile-grid ${isFew ? "few" : "many"}`} data-robots={names.length}>
        {names.map((name) => (
          <Tile key={name} robot={name} cameras={isFew || name === selected ? CAMERAS : CAMERAS.slice(0, 1)} />
        ))}
      </div>
    </section>
  );
}

function Tile({ robot, cameras }: { robot: string; cameras: readonly Camera[] }) {
  const element = useRef<HTMLElement>(null);
  const isSelected = robot === selectedRobot.value;

  useEffect(() => {
    const wanted = new Set(cameras);
    knownTiles.set(robot, wanted);
    const observer = new IntersectionObserver(([entry]) => {
      if (entry?.isIntersecting) visibleTiles.set(robot, wanted);
      else visibleTiles.delete(robot);
    });
    if (element.current) observer.observe(element.current);
    return () => {
      observer.disconnect();
      knownTiles.delete(robot);
      visibleTiles.delete(robot);
    };
  }, [robot, cameras.length]);

  return (
    <figure class={`tile ${isSelected ? "selected" : ""}`} ref={element}>
      <button
        type="button"
        class="tile-cameras"
        aria-pressed={isSelected}
        aria-label={`Select ${robot}`}
        onClick={() => (selectedRobot.value = robot)}
      >
        {cameras.map((camera) => (
          <CameraView key={camera} robot={robot} camera={camera} />
        ))}
      </button>
      <TileCaption robot={robot} />
    </figure>
  );
}

function CameraView({ robot, camera }: { robot: string; camera: Camera }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  useEffect(
    () =>
      registerCanvas(robot, camera, (image) => {
        const target = canvas.current;
        if (!target) return;
        if (target.width !== image.width) target.width = image.width;
        if (target.height !== image.height) target.height = image.height;
        target.getContext("2d")?.drawImage(image, 0, 0);
      }),
    [robot, camera],
  );
  return <canvas ref={canvas} width={256} height={256} role="img" aria-label={`${robot}, ${camera} camera`} />;
}

function TileCaption({ robot }: { robot: string }) {
  const caption = useComputed(() => {
    const moment = shown.value?.tiles[robot];
    const atWork = clock.value.mode === "live" ? running.value[robot] : undefined;
    const attempt = boards.value[robot]?.attempts.find(([id]) => id === moment?.attempt_id);
    const step = attempt ? boards.value[robot]?.steps[attempt[1]] : undefined;
    if (atWork) {
      const { shift, job, step: number } = atWork.step.key;
      return { state: "running", key: `${shift}.${job}.${number}`, task: atWork.step.task, frame: moment ? `${moment.index + 1}` : "" };
    }
    if (!moment) return { state: "pending", key: "", task: "nothing to see yet", frame: "" };
    return {
      state: moment.is_over ? (attempt?.[3] ?? "pending") : "running",
      key: step ? `${step[0]}.${step[1]}.${step[2]}` : "",
      task: step?.[4] ?? "",
      frame: `${moment.index + 1}/${moment.num_frames}`,
    };
  });
  const { state, key, task, frame } = caption.value;
  return (
    <figcaption>
      <span class="tile-name">
        <i class={`dot ${state}`} />
        {robot}
      </span>
      <span class="tile-task" title={task}>
        <b>{key}</b> {task}
      </span>
      <span class="tile-frame" title="control step shown, of the attempt's">
        {frame}
      </span>
    </figcaption>
  );
}
