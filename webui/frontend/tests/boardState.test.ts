import { describe, expect, it } from "vitest";
import { attemptAt, stepsAt } from "../src/boardState";
import type { Board } from "../src/types";

/** Step 1.1.1 is done at once; 1.1.2 fails twice, is given up, and is redone in the review. */
const BOARD: Board = {
  revision: 1,
  steps: [
    [1, 1, 1, false, "turn on the stove", "done", null],
    [1, 1, 2, false, "open the drawer", "given_up", "attempts"],
    [1, 1, 2, true, "open the drawer", "done", null],
  ],
  ends: [10, 30, 50],
  attempts: [
    ["a", 0, 1, "done", 0, 10, 99, ""],
    ["b", 1, 1, "failed", 11, 20, 99, ""],
    ["c", 1, 2, "failed", 21, 30, 99, ""],
    ["d", 2, 1, "done", 41, 50, 99, ""],
  ],
  hours: [
    [1, false, 0, 31],
    [1, true, 40, 50],
  ],
};
const states = (t: number) => stepsAt(BOARD, t).map(({ state }) => state);

describe("the shift board", () => {
  it("shows each step as it stood at a moment", () => {
    expect(states(-1)).toEqual(["pending", "pending"]);
    expect(states(5)).toEqual(["running", "pending"]);
    expect(states(15)).toEqual(["done", "running"]);
    expect(states(20.5)).toEqual(["done", "failed"]); // the second attempt has not begun
    expect(states(35)).toEqual(["done", "given_up"]);
    expect(states(45)).toEqual(["done", "running"]); // in its review
    expect(states(50)).toEqual(["done", "redone"]);
  });
  it("counts the attempts and names the last", () => {
    expect(stepsAt(BOARD, 25)[1]).toMatchObject({ numAttempts: 2, lastAttempt: "c", isRedo: false });
    expect(stepsAt(BOARD, 50)[1]).toMatchObject({ numAttempts: 3, lastAttempt: "d", isRedo: true });
  });
  it("shows what a live robot is at before it is recorded", () => {
    const running = { attempt_id: "x", step: { key: { shift: 1, job: 1, step: 2 }, task: "" }, number: 1, is_review: true, start_s: 60 };
    expect(stepsAt(BOARD, 61, running)[1]?.state).toBe("running");
    expect(stepsAt(BOARD, 59, running)[1]?.state).toBe("redone");
  });
  it("finds the attempt of a moment", () => {
    expect(attemptAt(BOARD, 20.5)?.[0]).toBe("b");
    expect(attemptAt(BOARD, -1)).toBeNull();
  });
});
