/** What the page knows and what it shows, as signals; and the loop that asks for what is to be seen. */

import { batch, computed, effect, signal } from "@preact/signals";
import { attemptAt } from "./boardState";
import { type ClockState, type RunEdge, changedSpeed, seek, tick, toggle } from "./clock";
import { Connection, type Picture } from "./connection";
import {
  type Board,
  type Camera,
  type Changes,
  type Exchange,
  type Hours,
  type Jump,
  type Opened,
  type RunEntry,
  type RunList,
  type Running,
  type Shown,
} from "./types";

export const isConnected = signal(false);
export const runs = signal<RunEntry[]>([]);
export const canAct = signal(false); // false: a read-only page
export const canLaunch = signal(false); // runs can be started from here
export const run = signal<Opened | null>(null);
export const awaited = signal<string | null>(null); // why the run that the address names is not open yet
export const problem = signal<string | null>(null); // one line about what went wrong last
export const notice = signal<string | null>(null); // one line about what has been done

export const clock = signal<ClockState>({ t: 0, mode: "pause", speed: 1, reviewSpeed: 1 });
export const shown = signal<Shown | null>(null);
export const hasShown = computed(() => shown.value !== null); // the first pictures are on the screen: now the rest
export const boards = signal<Record<string, Board>>({});
export const running = signal<Record<string, Running>>({});
export const series = signal<string[]>([]); // names of what engine and machine were sampled for
export const selectedRobot = signal("");
export const openAttempt = signal<string | null>(null); // shown in the step panel
export const focusedExchange = signal<number | null>(null);
export const hover = signal<number | null>(null); // the moment under the mouse, on any time axis
export const view = signal<[number, number]>([0, 60]); // the stretch of time that the axes show
export const isFollowing = signal(true); // the view moves with a live run

/** The clock's moment for what need not follow each frame: at once while paused, else five times a second. */
export const slowTime = signal(0);
const liveEnd = signal(0); // of a live run: its clock's time, five times a second
let liveNow = 0; // and at each frame

export const edge = computed<RunEdge>(() => {
  const opened = run.value;
  if (!opened) return { end: 0, isLive: false };
  return { end: Math.max(liveEnd.value, opened.end_s), isLive: shown.value?.is_live ?? opened.is_live };
});
export const robots = computed(() => run.value?.robots.map(({ robot }) => robot) ?? []);
export const selectedHours = computed<Hours[]>(
  () => boards.value[selectedRobot.value]?.hours ?? [],
);

// --- tiles: drawn as they come, outside of the signals ------------------------------------------

type Draw = (image: ImageBitmap) => void;
const canvases = new Map<string, Draw>(); // "robot number/camera" -> what draws there
const lastPictures = new Map<string, ImageBitmap>();
export const visibleTiles = new Map<string, Set<Camera>>(); // robots whose cameras are on the screen
export const knownTiles = new Map<string, Set<Camera>>(); // all that exist on the page
export const visibleBoards = new Set<string>();

export function registerCanvas(robot: string, camera: Camera, draw: Draw): () => void {
  const place = `${robots.value.indexOf(robot)}/${camera}`;
  canvases.set(place, draw);
  const last = lastPictures.get(place);
  if (last) draw(last);
  return () => {
    if (canvases.get(place) === draw) canvases.delete(place);
  };
}

async function takePicture(picture: Picture): Promise<void> {
  const place = `${picture.robot}/${picture.camera}`;
  const of = run.value?.run;
  const image = await createImageBitmap(picture.jpeg);
  if (run.value?.run !== of) return;
  lastPictures.get(place)?.close();
  lastPictures.set(place, image);
  canvases.get(place)?.(image);
}

// --- the connection and the wishes -----------------------------------------------------------------

const MIN_WISH_MS = 30;
const OFF_SCREEN_MS = 1000;
const IDLE_MS = 1000;
const SLOW_MS = 200;

let connection: Connection;
let wishNumber = 0;
let isWishOpen = false;
let wishedAt = 0;
let allTilesAt = 0;
let isOpenExact = false;
let openPlace = ""; // what the open wish is about
let settledPlace = ""; // what the last fulfilled wish was about
let lastWishWasExact = false;
let decoding: Promise<unknown> = Promise.resolve();

export function connect(): void {
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  connection = new Connection(`${scheme}://${location.host}/socket`, {
    connected: () => void start(),
    disconnected: () => {
      isConnected.value = false;
      isWishOpen = false;
    },
    picture: (picture) => {
      decoding = Promise.all([decoding, takePicture(picture)]);
    },
    changes: takeChanges,
    shown: (message) => void takeShown(message),
  });
  requestAnimationFrame(animate);
}

export const ask = <T>(type: string, fields: Record<string, unknown> = {}): Promise<T> =>
  connection.ask<T>(type, fields);

/** Asks, and shows a refusal in one line. */
export async function tryTo<T>(work: Promise<T>): Promise<T | undefined> {
  try {
    return await work;
  } catch (error) {
    problem.value = error instanceof Error ? error.message : String(error);
    return undefined;
  }
}

async function start(): Promise<void> {
  isConnected.value = true;
  const place = readPlace();
  const again = run.value?.run;
  const wanted = again ?? place.run;
  const listing = refreshRuns();
  if (wanted) awaited.value = await open(wanted, again ? { t: clock.value.t } : place);
  await listing;
  const newest = runs.value[0]?.run;
  if (!wanted && newest) awaited.value = await open(newest);
  if (!run.value) setTimeout(() => isConnected.value && void start(), 1000); // it has not begun to record yet
}

export async function refreshRuns(): Promise<void> {
  const found = await tryTo(ask<RunList>("runs"));
  if (!found) return;
  batch(() => {
    runs.value = found.runs;
    canAct.value = !found.is_read_only;
    canLaunch.value = found.can_launch;
  });
}

interface Place {
  run?: string;
  t?: number;
  robot?: string;
  attempt?: string;
}

/** The place that the address names: #run=…&t=…&robot=…&attempt=… */
function readPlace(): Place {
  const fields = new URLSearchParams(location.hash.slice(1));
  const place: Place = {};
  const name = fields.get("run");
  const t = fields.get("t");
  const robot = fields.get("robot");
  const attempt = fields.get("attempt");
  if (name) place.run = name;
  if (t !== null && Number.isFinite(Number(t))) place.t = Number(t);
  if (robot) place.robot = robot;
  if (attempt) place.attempt = attempt;
  return place;
}

export async function openRun(name: string, place: Place = {}): Promise<void> {
  problem.value = (await open(name, place)) ?? problem.value;
}

/** Opens a run; in one line why not, if it cannot be opened. */
async function open(name: string, place: Place = {}): Promise<string | null> {
  let opened: Opened;
  try {
    opened = await ask<Opened>("open", { run: name });
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
  const isSame = run.value?.run === opened.run;
  batch(() => {
    liveNow = liveEnd.value = opened.now_s;
    run.value = opened;
    series.value = opened.series;
    shown.value = null;
    if (!isSame) {
      boards.value = {};
      running.value = {};
      openAttempt.value = null;
      focusedExchange.value = null;
      for (const image of lastPictures.values()) image.close();
      lastPictures.clear();
      selectedRobot.value = place.robot ?? opened.robots[0]?.robot ?? "";
      isFollowing.value = true;
      view.value = [0, Math.max(opened.now_s, 10)];
    }
    const isLive = opened.is_live && place.t === undefined && !place.attempt;
    const t = place.t ?? (opened.is_live ? opened.now_s : 0);
    clock.value = { ...clock.value, t, mode: isLive ? "live" : "pause" };
  });
  settledPlace = "";
  if (place.attempt) await showAttempt(place.attempt, place.t);
  return null;
}

function takeChanges(changes: Changes): void {
  batch(() => {
    if (Object.keys(changes.boards).length) boards.value = { ...boards.value, ...changes.boards };
    running.value = changes.running;
    if (changes.series.join() !== series.value.join()) series.value = changes.series;
  });
}

async function takeShown(message: Shown): Promise<void> {
  await decoding; // a page that decodes slowly asks less often
  const before = edge.value;
  const { t, mode } = clock.value;
  const isUntouched = mode === "pause" && (t === 0 || t >= before.end);
  batch(() => {
    shown.value = message;
    if (message.is_live && !before.isLive && isUntouched) clock.value = { ...clock.value, mode: "live" };
    liveNow = Math.max(liveNow, message.now_s);
    if (!message.is_live) liveEnd.value = liveNow;
  });
  if (message.seek !== wishNumber) return; // it was overtaken by a newer wish
  isWishOpen = false;
  settledPlace = openPlace;
  lastWishWasExact = isOpenExact;
}

/** Sends the next wish: after the last is fulfilled, or at once where that one waits for an exact picture. */
function wishIfNeeded(now: number): void {
  const opened = run.value;
  if (!opened || !connection.isOpen || now - wishedAt < MIN_WISH_MS || (isWishOpen && !isOpenExact)) return;
  if (opened.robots.length && !knownTiles.size) return; // the page is being drawn
  const { t, mode } = clock.value;
  const everything = mode !== "pause" && now - allTilesAt > OFF_SCREEN_MS;
  const tiles = [...tilesToShow(everything)].map(([robot, cameras]): [string, Camera[]] => [robot, [...cameras]]);
  const place = JSON.stringify([opened.run, t, mode, tiles, [...visibleBoards], selectedRobot.value]);
  const isSettled = mode === "pause" && place === settledPlace;
  if (isWishOpen && place === openPlace) return;
  if (isSettled && lastWishWasExact && now - wishedAt < IDLE_MS) return;
  wishedAt = now;
  if (everything) allTilesAt = now;
  isWishOpen = true;
  isOpenExact = isSettled;
  openPlace = place;
  connection.wish({
    seek: ++wishNumber,
    t: mode === "live" ? null : t,
    exact_robot: isSettled ? selectedRobot.value : null, // the recorded picture first: it is there at once
    tiles,
    boards: Object.fromEntries(boardsToShow().map((name) => [name, boards.value[name]?.revision ?? -1])),
  });
}

/** The selected robot's first of all: what is on the screen is known a moment later. */
function tilesToShow(everything: boolean): Map<string, Set<Camera>> {
  if (everything) return knownTiles;
  const cameras = knownTiles.get(selectedRobot.value);
  return visibleTiles.size || !cameras ? visibleTiles : new Map([[selectedRobot.value, cameras]]);
}

function boardsToShow(): string[] {
  return [...new Set([selectedRobot.value, ...(hasShown.value ? visibleBoards : [])])];
}

let lastFrame = 0;
let lastSlow = 0;

function animate(now: number): void {
  const elapsed = Math.min(0.25, (now - lastFrame) / 1000);
  lastFrame = now;
  const before = clock.value;
  const { isLive, end } = edge.value;
  if (isLive) liveNow += elapsed;
  const after = tick(before, elapsed, selectedHours.value, { end: isLive ? liveNow : end, isLive });
  if (after.t !== before.t || after.mode !== before.mode) clock.value = after;
  if (after.mode === "pause" || now - lastSlow > SLOW_MS) {
    lastSlow = now;
    batch(() => {
      slowTime.value = after.t;
      if (isLive) liveEnd.value = liveNow;
      if (after.mode === "live" && isFollowing.value) followLive();
    });
  }
  wishIfNeeded(now);
  requestAnimationFrame(animate);
}

function followLive(): void {
  const [from, to] = view.value;
  const end = edge.value.end;
  if (end <= to) return;
  const width = to - from;
  view.value = from === 0 ? [0, end * 1.15] : [end - width * 0.9, end + width * 0.1];
}

// --- what the user does --------------------------------------------------------------------------

export function seekTo(t: number): void {
  focusedExchange.value = null;
  clock.value = seek(clock.value, t, edge.value);
  keepInView();
}

export function togglePlay(): void {
  focusedExchange.value = null;
  clock.value = toggle(clock.value, edge.value);
}

export function pause(): void {
  if (clock.value.mode !== "pause") clock.value = { ...clock.value, mode: "pause" };
}

export function goLive(): void {
  if (!edge.value.isLive) return;
  isFollowing.value = true;
  clock.value = { ...clock.value, mode: "live", t: edge.value.end };
}

export function setSpeed(speed: number): void {
  clock.value = { ...clock.value, speed };
}

export function setReviewSpeed(reviewSpeed: number): void {
  clock.value = { ...clock.value, reviewSpeed };
}

export function changeSpeed(direction: 1 | -1): void {
  setSpeed(changedSpeed(clock.value.speed, direction));
}

/** One control step on or back, of the selected robot. */
export async function stepFrame(delta: number): Promise<void> {
  pause();
  const t = await tryTo(ask<number>("frame", { robot: selectedRobot.value, t: clock.value.t, delta }));
  if (t !== undefined) seekTo(t);
}

export async function jump(kind: "failure" | "review" | "recall", isForward: boolean): Promise<void> {
  const found = await tryTo(ask<Jump | null>("jump", { kind, t: clock.value.t, is_forward: isForward }));
  if (!found) {
    if (found === null) notice.value = `no ${isForward ? "further" : "earlier"} ${kind}`;
    return;
  }
  batch(() => {
    selectedRobot.value = found.robot;
    seekTo(found.t);
    focusedExchange.value = found.exchange;
  });
}

/** Opens the step panel at an attempt and moves the clock to `t`, by default to its last frame. */
export async function showAttempt(attemptId: string, t?: number): Promise<void> {
  const detail = await tryTo(ask<{ robot: string; end_s: number; frame_times: number[] }>("attempt", { attempt_id: attemptId }));
  if (!detail) return;
  batch(() => {
    selectedRobot.value = detail.robot;
    openAttempt.value = attemptId;
    pause();
    seekTo(t ?? detail.frame_times.at(-1) ?? detail.end_s);
  });
}

export function showExchange(robot: string, exchange: Pick<Exchange, "idx">, t: number): void {
  batch(() => {
    selectedRobot.value = robot;
    seekTo(t);
    focusedExchange.value = exchange.idx;
  });
}

export function attemptOfSelected(): string | null {
  const board = boards.value[selectedRobot.value];
  return board ? (attemptAt(board, clock.value.t)?.[0] ?? null) : null;
}

function keepInView(): void {
  const [from, to] = view.value;
  const { t } = clock.value;
  if (t >= from && t <= to) return;
  const width = to - from;
  view.value = t < from ? [Math.max(0, t - width * 0.1), Math.max(width, t + width * 0.9)] : [t - width * 0.9, t + width * 0.1];
}

export function fitView(): void {
  isFollowing.value = true;
  view.value = [0, Math.max(edge.value.end, 10)];
}

/** Zooms by a factor around a moment. */
export function zoom(factor: number, around: number): void {
  const [from, to] = view.value;
  const end = Math.max(edge.value.end, 10);
  const width = Math.min(Math.max((to - from) * factor, 0.5), end * 1.2);
  const share = (around - from) / (to - from);
  const start = Math.max(0, Math.min(around - share * width, end * 1.2 - width));
  isFollowing.value = false;
  view.value = [start, start + width];
}

export function pan(seconds: number): void {
  const [from, to] = view.value;
  const start = Math.max(0, from + seconds);
  isFollowing.value = false;
  view.value = [start, start + (to - from)];
}


const NOTICE_MS = 6000;
effect(() => {
  if (notice.value === null) return;
  const timer = setTimeout(() => (notice.value = null), NOTICE_MS);
  return () => clearTimeout(timer);
});

// --- the address names the place, so that it can be sent to somebody --------------------------------

let placeTimer = 0;
effect(() => {
  const opened = run.value;
  const fields = new URLSearchParams();
  if (!opened) return;
  fields.set("run", opened.run);
  // Rounded up: rounded down it would lead to the frame before.
  if (clock.value.mode === "pause") fields.set("t", (Math.ceil(clock.value.t * 1000) / 1000).toFixed(3));
  if (selectedRobot.value !== opened.robots[0]?.robot) fields.set("robot", selectedRobot.value);
  if (openAttempt.value) fields.set("attempt", openAttempt.value);
  clearTimeout(placeTimer);
  placeTimer = window.setTimeout(() => history.replaceState(null, "", `#${fields}`), 300);
});
