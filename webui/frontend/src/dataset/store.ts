/** What the page of a dataset knows and shows, as signals. */

import { batch, computed, effect, signal } from "@preact/signals";
import { type ClockState, type RunEdge, changedSpeed, seek, tick, toggle } from "../clock";
import { chosen, type Kind } from "./episodes";
import { type Place, readPlace, writePlace } from "./place";
import type { Episode, Overview } from "./types";

export const overview = signal<Overview | null>(null);
export const episode = signal<Episode | null>(null);
export const problem = signal<string | null>(null); // one line about what went wrong last
export const kind = signal<Kind>("");
export const text = signal("");
export const isHelpOpen = signal(false);
export const clock = signal<ClockState>({ t: 0, mode: "pause", speed: 1, reviewSpeed: 1 });
export const hover = signal<number | null>(null); // the moment under the mouse, on any time axis

export const fps = computed(() => overview.value?.fps ?? 1);
export const numFrames = computed(() => episode.value?.line.num_frames ?? 1);
export const edge = computed<RunEdge>(() => ({ end: (numFrames.value - 1) / fps.value, isLive: false }));
export const frame = computed(() => frameAt(clock.value.t));
export const listed = computed(() => chosen(overview.value?.episodes ?? [], kind.value, text.value));

/** The frame that is shown at a moment. */
export function frameAt(t: number): number {
  return Math.min(numFrames.value - 1, Math.max(0, Math.floor(t * fps.value + 1e-6)));
}

async function load<T>(path: string): Promise<T | null> {
  try {
    const response = await fetch(path);
    const body = (await response.json()) as T & { detail?: string };
    if (response.ok) return body;
    problem.value = body.detail ?? `the server answered ${response.status}`;
  } catch (error) {
    problem.value = `the server does not answer: ${error instanceof Error ? error.message : String(error)}`;
  }
  return null;
}

export async function start(): Promise<void> {
  overview.value = await load<Overview>("/dataset/overview");
  if (!overview.value) return;
  await openPlace(readPlace(location.hash));
  addEventListener("hashchange", () => void openPlace(readPlace(location.hash)));
  requestAnimationFrame(animate);
}

let wanted = -1; // the episode that is being loaded, or is open

async function openPlace(place: Place): Promise<void> {
  if (place.episode !== wanted || !episode.value) {
    wanted = place.episode;
    const found = await load<Episode>(`/dataset/episodes/${place.episode}`);
    if (wanted !== place.episode) return; // another one was asked for meanwhile
    if (!found) {
      wanted = episode.value?.line.episode ?? -1;
      return;
    }
    batch(() => {
      episode.value = found;
      problem.value = null;
      hover.value = null;
      clock.value = { ...clock.value, t: 0, mode: "pause" };
    });
  }
  seekToFrame(place.frame);
}

export function openEpisode(number: number): void {
  if (number !== episode.value?.line.episode) void openPlace({ episode: number, frame: 0 });
}

/** The next or previous of the listed episodes. */
export function openNeighbour(delta: number): void {
  const lines = listed.value;
  const place = lines.findIndex((line) => line.episode === episode.value?.line.episode);
  const next = lines[place === -1 ? 0 : place + delta];
  if (next) openEpisode(next.episode);
}

let lastFrame = 0;

function animate(now: number): void {
  const elapsed = Math.min(0.25, (now - lastFrame) / 1000);
  lastFrame = now;
  const after = tick(clock.value, elapsed, [], edge.value);
  if (after.t !== clock.value.t || after.mode !== clock.value.mode) clock.value = after;
  requestAnimationFrame(animate);
}

// --- what the user does --------------------------------------------------------------------------

export function seekTo(t: number): void {
  clock.value = seek(clock.value, t, edge.value);
}

export function seekToFrame(number: number): void {
  seekTo(Math.min(number, numFrames.value - 1) / fps.value);
}

export function stepFrame(delta: number): void {
  const number = frame.value + delta;
  clock.value = { ...clock.value, mode: "pause" };
  seekToFrame(number);
}

export function togglePlay(): void {
  clock.value = toggle(clock.value, edge.value);
}

export function setSpeed(speed: number): void {
  clock.value = { ...clock.value, speed };
}

export function changeSpeed(direction: 1 | -1): void {
  setSpeed(changedSpeed(clock.value.speed, direction));
}

// The address names the place, so that it can be sent to somebody.
let placeTimer = 0;
effect(() => {
  if (!episode.value || clock.value.mode !== "pause") return;
  const address = writePlace({ episode: episode.value.line.episode, frame: frame.value });
  clearTimeout(placeTimer);
  placeTimer = window.setTimeout(() => history.replaceState(null, "", address), 300);
});
