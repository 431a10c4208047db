/** The page by keyboard. */

import { isHelpOpen } from "./components/TopBar";
import { changeSpeed, clock, edge, fitView, goLive, jump, openAttempt, robots, seekTo, selectedRobot, stepFrame, togglePlay, zoom } from "./store";
import { toggleTheme } from "./theme";

export const KEYS: readonly [string, string][] = [
  ["space", "play or pause"],
  ["← →", "one frame back or on"],
  ["shift ← →", "five seconds back or on"],
  ["home, end", "first and last moment"],
  ["L", "follow the live run"],
  ["F R M", "next failure, review, recall (with shift: the one before)"],
  ["+ −", "faster, slower"],
  ["[ ]", "previous, next robot"],
  ["Z X", "zoom in, out; 0 shows the whole run"],
  ["T", "light or dark"],
  ["esc", "close the step"],
];

const ACTIONS: Record<string, (event: KeyboardEvent) => void> = {
  " ": togglePlay,
  ArrowLeft: (event) => (event.shiftKey ? seekTo(clock.value.t - 5) : void stepFrame(-1)),
  ArrowRight: (event) => (event.shiftKey ? seekTo(clock.value.t + 5) : void stepFrame(1)),
  Home: () => seekTo(0),
  End: () => seekTo(edge.value.end),
  l: goLive,
  f: (event) => void jump("failure", !event.shiftKey),
  r: (event) => void jump("review", !event.shiftKey),
  m: (event) => void jump("recall", !event.shiftKey),
  "+": () => changeSpeed(1),
  "=": () => changeSpeed(1),
  "-": () => changeSpeed(-1),
  "[": () => selectNeighbour(-1),
  "]": () => selectNeighbour(1),
  z: () => zoom(0.5, clock.value.t),
  x: () => zoom(2, clock.value.t),
  "0": fitView,
  t: toggleTheme,
  "?": () => (isHelpOpen.value = true),
  Escape: () => (openAttempt.value = null),
};

function selectNeighbour(delta: number): void {
  const names = robots.value;
  const place = names.indexOf(selectedRobot.value) + delta;
  selectedRobot.value = names[(place + names.length) % names.length] ?? selectedRobot.value;
}

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
