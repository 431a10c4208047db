import { describe, expect, it } from "vitest";
import { changedSpeed, type ClockState, isInReview, seek, tick, toggle } from "../src/clock";
import type { Hours } from "../src/types";

const HOURS: Hours[] = [
  [1, false, 0, 50],
  [1, true, 50, 60],
];
const at = (t: number, mode: ClockState["mode"] = "play"): ClockState => ({ t, mode, speed: 10, reviewSpeed: 2 });
const recorded = { end: 100, isLive: false };
const live = { end: 100, isLive: true };

describe("the clock", () => {
  it("runs at one speed in the operation and at another in reviews", () => {
    expect(tick(at(10), 1, HOURS, recorded).t).toBe(20);
    expect(tick(at(52), 1, HOURS, recorded).t).toBe(54);
    expect(isInReview(HOURS, 60)).toBe(false);
    expect(isInReview([[2, true, 70, null]], 99)).toBe(true);
  });
  it("stops at the end of a recorded run and follows a live one", () => {
    expect(tick(at(99), 1, [], recorded)).toMatchObject({ t: 100, mode: "pause" });
    expect(tick(at(99), 1, [], live)).toMatchObject({ t: 100, mode: "live" });
    expect(tick(at(10, "live"), 1, [], live)).toMatchObject({ t: 100, mode: "live" });
    expect(tick(at(10, "live"), 1, [], recorded)).toMatchObject({ t: 100, mode: "pause" });
    expect(tick(at(10, "pause"), 1, [], live).t).toBe(10);
  });
  it("stays inside the run when it is moved, and leaves the live tail", () => {
    expect(seek(at(10, "live"), 40, live)).toMatchObject({ t: 40, mode: "pause" });
    expect(seek(at(10), -5, recorded)).toMatchObject({ t: 0, mode: "play" });
    expect(seek(at(10), 500, recorded).t).toBe(100);
  });
  it("starts again from the end", () => {
    expect(toggle(at(100, "pause"), recorded)).toMatchObject({ t: 0, mode: "play" });
    expect(toggle(at(100, "pause"), live)).toMatchObject({ mode: "live" });
    expect(toggle(at(50, "live"), live)).toMatchObject({ t: 50, mode: "pause" });
  });
  it("goes through the offered speeds and no further", () => {
    expect(changedSpeed(1, 1)).toBe(2);
    expect(changedSpeed(60, 1)).toBe(60);
    expect(changedSpeed(0.25, -1)).toBe(0.25);
  });
});
