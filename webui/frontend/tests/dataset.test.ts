import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";
import { chosen, kinds } from "../src/dataset/episodes";
import { Pictures } from "../src/dataset/pictures";
import { readPlace, runAddress, writePlace } from "../src/dataset/place";
import type { Episode, EpisodeLine } from "../src/dataset/types";

const line = (episode: number, changes: Partial<EpisodeLine> = {}): EpisodeLine => ({
  episode,
  num_frames: 12,
  task: "turn on the stove",
  step: "1.1.1",
  attempt: 1,
  outcome: "done",
  is_given_up: false,
  is_review: false,
  ...changes,
});

const LINES = [line(0), line(1, { outcome: "failed", is_given_up: true, step: "2.1.3" }), line(2, { is_review: true, task: "open the drawer" })];

describe("the list of episodes", () => {
  it("offers the kinds that occur, with their numbers", () => {
    expect(kinds(LINES)).toEqual([["", 3], ["done", 2], ["failed", 1], ["given up", 1], ["review", 1]]);
    expect(kinds([line(0, { outcome: "" })])).toEqual([["", 1]]); // a dataset without facts
  });

  it("is filtered by kind and by words", () => {
    const numbers = (kind: string, text: string) => chosen(LINES, kind, text).map(({ episode }) => episode);
    expect(numbers("", "")).toEqual([0, 1, 2]);
    expect(numbers("given up", "")).toEqual([1]);
    expect(numbers("done", "DRAWER ")).toEqual([2]);
    expect(numbers("", "2.1.3")).toEqual([1]);
    expect(numbers("", "#2")).toEqual([2]);
  });
});

describe("addresses", () => {
  it("name an episode and a frame", () => {
    expect(readPlace(writePlace({ episode: 7, frame: 41 }))).toEqual({ episode: 7, frame: 41 });
    expect(readPlace("#episode=-1&frame=x")).toEqual({ episode: 0, frame: 0 });
    expect(readPlace("")).toEqual({ episode: 0, frame: 0 });
  });

  it("lead to the same moment of the run, while it is there", () => {
    const episode: Episode = {
      line: line(0),
      facts: { robot: "robot-2" },
      curves: [],
      words: [],
      as_recorded: {},
      identity: ["arm 1", "a-1"],
      run: "matrix/arm 1",
      recorded_at: [10, 10.0512],
    };
    const fields = new URLSearchParams(runAddress(episode, 1)?.slice(2));
    expect(Object.fromEntries(fields)).toEqual({ run: "matrix/arm 1", t: "10.0512", robot: "robot-2", attempt: "a-1" });
    expect(runAddress({ ...episode, run: null }, 1)).toBeNull();
    expect(runAddress({ ...episode, identity: null }, 1)).toBeNull();
  });
});

describe("pictures of a camera", () => {
  const asked: number[] = [];
  let answers: Map<number, () => void>;

  beforeEach(() => {
    asked.length = 0;
    answers = new Map();
    vi.stubGlobal("fetch", (path: string) => {
      const frame = Number(path.split("/").at(-1)?.replace(".png", ""));
      asked.push(frame);
      return new Promise((resolve) => answers.set(frame, () => resolve({ ok: true, blob: async () => frame })));
    });
    vi.stubGlobal("createImageBitmap", async (frame: number) => ({ frame, close: () => undefined }));
  });
  afterEach(() => vi.unstubAllGlobals());

  const settle = () => new Promise((resolve) => setTimeout(resolve, 0));
  const answer = async (frame: number) => {
    answers.get(frame)?.();
    await settle();
  };

  it("one at a time: the wanted one first, then its neighbours", async () => {
    const drawn: number[] = [];
    const pictures = new Pictures("/p", 20, (_, frame) => drawn.push(frame), () => undefined);
    pictures.show(3);
    for (const frame of [3, 4, 2, 5, 6, 7, 8]) await answer(frame);
    expect(asked).toEqual([3, 4, 2, 5, 6, 7]); // four and no more ahead
    expect(drawn).toEqual([3]);
    pictures.show(4); // it is there already
    expect(drawn).toEqual([3, 4]);
  });

  it("of many that are wanted meanwhile only the last is fetched", async () => {
    const drawn: number[] = [];
    const pictures = new Pictures("/p", 100, (_, frame) => drawn.push(frame), () => undefined);
    for (let frame = 0; frame < 50; frame++) pictures.show(frame);
    await answer(0);
    expect(asked).toEqual([0, 49]);
    await answer(49);
    expect(drawn).toEqual([0, 49]);
  });

  it("nothing is drawn after it was closed", async () => {
    const drawn: number[] = [];
    const pictures = new Pictures("/p", 8, (_, frame) => drawn.push(frame), () => undefined);
    pictures.show(0);
    pictures.close();
    await answer(0);
    expect(drawn).toEqual([]);
    expect(asked).toEqual([0]);
  });
});
