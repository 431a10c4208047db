/** The one clock of the page: every panel shows the moment that it stands at. */

import type { Hours } from "./types";

export type Mode = "live" | "play" | "pause";
export const SPEEDS = [0.25, 0.5, 1, 2, 5, 10, 20, 60] as const;

export interface ClockState {
  readonly t: number; // seconds on the run clock
  readonly mode: Mode;
  readonly speed: number; // run seconds per second, in the operation
  readonly reviewSpeed: number; // and in the reviews of the selected robot
}

export interface RunEdge {
  readonly end: number; // the last moment there is; of a live run, now
  readonly isLive: boolean;
}

export function isInReview(hours: readonly Hours[], t: number): boolean {
  return hours.some(([, isReview, start, end]) => isReview && start <= t && (end === null || t < end));
}

/** The clock after `elapsed` seconds of real time. At the end a recorded run pauses, a live one is followed. */
export function tick(clock: ClockState, elapsed: number, hours: readonly Hours[], edge: RunEdge): ClockState {
  if (clock.mode === "live") {
    return edge.isLive ? { ...clock, t: edge.end } : { ...clock, t: edge.end, mode: "pause" };
  }
  if (clock.mode === "pause") return clock;
  const t = clock.t + elapsed * (isInReview(hours, clock.t) ? clock.reviewSpeed : clock.speed);
  if (t < edge.end) return { ...clock, t };
  return { ...clock, t: edge.end, mode: edge.isLive ? "live" : "pause" };
}

/** Moves to a moment. A live clock pauses there; a playing one goes on. */
export function seek(clock: ClockState, t: number, edge: RunEdge): ClockState {
  const inside = Math.min(Math.max(t, 0), edge.end);
  return { ...clock, t: inside, mode: clock.mode === "live" ? "pause" : clock.mode };
}

/** Starts or pauses; at the end of a recorded run it starts again from the beginning. */
export function toggle(clock: ClockState, edge: RunEdge): ClockState {
  if (clock.mode !== "pause") return { ...clock, mode: "pause" };
  if (clock.t < edge.end) return { ...clock, mode: "play" };
  return edge.isLive ? { ...clock, mode: "live" } : { ...clock, t: 0, mode: "play" };
}

/** The next faster or slower of the offered speeds. */
export function changedSpeed(speed: number, direction: 1 | -1): number {
  const faster = SPEEDS.filter((one) => (one - speed) * direction > 0);
  return (direction > 0 ? faster[0] : faster.at(-1)) ?? speed;
}
