/** Play, pause, scrub, step, speed; the page by keyboard. */

import { SPEEDS } from "../clock";
import { Icon } from "../components/icons";
import { toggleTheme } from "../theme";
import { changeSpeed, clock, edge, frame, isHelpOpen, numFrames, openNeighbour, seekTo, seekToFrame, setSpeed, stepFrame, togglePlay } from "./store";

export function Transport() {
  const { t, mode, speed } = clock.value;
  return (
    <footer class="transport" aria-label="Transport">
      <div class="buttons">
        <button type="button" class="icon-button" aria-label="One frame back" title="One frame back (←)" onClick={() => stepFrame(-1)}>
          <Icon name="back" />
        </button>
        <button type="button" class="play" aria-label={mode === "pause" ? "Play" : "Pause"} title="Play or pause (space)" onClick={togglePlay}>
          <Icon name={mode === "pause" ? "play" : "pause"} />
        </button>
        <button type="button" class="icon-button" aria-label="One frame on" title="One frame on (→)" onClick={() => stepFrame(1)}>
          <Icon name="forward" />
        </button>
      </div>
      <output class="clock" aria-label="Time in the episode">
        {t.toFixed(2)} s<small> / {edge.value.end.toFixed(2)} s</small>
      </output>
      <input
        class="scrubber"
        type="range"
        min={0}
        max={numFrames.value - 1}
        value={frame.value}
        aria-label="Frame of the episode"
        onInput={(event) => seekToFrame(Number(event.currentTarget.value))}
      />
      <output class="frame-number" aria-label="Frame">
        {frame.value} <small>/ {numFrames.value - 1}</small>
      </output>
      <div class="speeds">
        <label>
          <span>speed</span>
          <select aria-label="speed" value={String(speed)} onChange={(event) => setSpeed(Number(event.currentTarget.value))}>
            {SPEEDS.map((one) => (
              <option key={one} value={String(one)}>
                {one}×
              </option>
            ))}
          </select>
        </label>
      </div>
    </footer>
  );
}

export const KEYS: readonly [string, string][] = [
  ["space", "play or pause"],
  ["← →", "one frame back or on"],
  ["shift ← →", "one second back or on"],
  ["home, end", "first and last frame"],
  ["[ ]", "previous, next episode of the list"],
  ["+ −", "faster, slower"],
  ["T", "light or dark"],
];

const ACTIONS: Record<string, (event: KeyboardEvent) => void> = {
  " ": togglePlay,
  ArrowLeft: (event) => (event.shiftKey ? seekTo(clock.value.t - 1) : stepFrame(-1)),
  ArrowRight: (event) => (event.shiftKey ? seekTo(clock.value.t + 1) : stepFrame(1)),
  Home: () => seekToFrame(0),
  End: () => seekToFrame(numFrames.value - 1),
  "[": () => openNeighbour(-1),
  "]": () => openNeighbour(1),
  "+": () => changeSpeed(1),
  "=": () => changeSpeed(1),
  "-": () => changeSpeed(-1),
  t: toggleTheme,
  "?": () => (isHelpOpen.value = true),
};

export function listenToKeys(): void {
  document.addEventListener("keydown", (event) => {
    const target = event.target as HTMLElement;
    const isWriting = target.matches("input:not([type=range]), textarea, select");
    if (isWriting || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === " " && target.matches("button, a")) return; // it presses that button
    const action = ACTIONS[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action(event);
  });
}
