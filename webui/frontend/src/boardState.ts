/** How the job steps of a robot stood at any moment, from its board. */

import type { AttemptRow, Board, Running, StepRow } from "./types";

export type StepState = "pending" | "running" | "failed" | "done" | "given_up" | "redone" | "infra" | "cancelled";

export interface StepView {
  readonly key: string; // "1.2.3"
  readonly shift: number;
  readonly job: number;
  readonly step: number;
  readonly task: string;
  readonly state: StepState; // failed, infra: an attempt ended so and the next has not begun
  readonly isRedo: boolean; // the state comes from the review
  readonly reason: string | null; // why it was given up
  readonly numAttempts: number; // begun up to now, of the shift and of the review
  readonly lastAttempt: string | null; // the one that runs, or the last that ended
}

interface Found {
  state: StepState;
  attempts: number;
  last: AttemptRow | null;
}

export function stepKey(shift: number, job: number, step: number): string {
  return `${shift}.${job}.${step}`;
}

/** Every step of the plan as it stood at `t`; `running` is the attempt at work now, of a live run. */
export function stepsAt(board: Board, t: number, running?: Running): StepView[] {
  const found = new Map<number, Found>();
  for (const attempt of board.attempts) {
    if (attempt[4] > t) continue;
    const [, place, , outcome, , end] = attempt;
    const before = found.get(place)?.attempts ?? 0;
    const state = end > t ? "running" : outcome === "done" ? "done" : outcome;
    found.set(place, { state, attempts: before + 1, last: attempt });
  }
  const redos = new Map<string, { step: StepRow; place: number }>();
  board.steps.forEach((step, place) => {
    if (step[3]) redos.set(stepKey(step[0], step[1], step[2]), { step, place });
  });
  const views: StepView[] = [];
  board.steps.forEach((step, place) => {
    if (step[3]) return;
    const key = stepKey(step[0], step[1], step[2]);
    const own = stateOf(board, place, t, found.get(place));
    const redo = redos.get(key);
    const again = redo ? stateOf(board, redo.place, t, found.get(redo.place)) : null;
    const isRedo = again !== null && again.state !== "pending";
    let state = isRedo ? (again.state === "done" ? "redone" : again.state) : own.state;
    if (running && running.start_s <= t && keyOf(running) === key) state = "running";
    views.push({
      key,
      shift: step[0],
      job: step[1],
      step: step[2],
      task: step[4],
      state,
      isRedo,
      reason: step[6],
      numAttempts: own.attempts + (again?.attempts ?? 0),
      lastAttempt: (again?.last ?? own.last)?.[0] ?? null,
    });
  });
  return views;
}

function keyOf(running: Running): string {
  const { shift, job, step } = running.step.key;
  return stepKey(shift, job, step);
}

function stateOf(board: Board, place: number, t: number, found: Found | undefined): Found {
  const end = board.ends[place] ?? null;
  if (end !== null && end <= t) {
    const state = board.steps[place]?.[5] === "done" ? "done" : "given_up";
    return { state, attempts: found?.attempts ?? 0, last: found?.last ?? null };
  }
  return found ?? { state: "pending", attempts: 0, last: null };
}

/** The attempt at work at `t`, or the last one before. */
export function attemptAt(board: Board, t: number): AttemptRow | null {
  let found: AttemptRow | null = null;
  for (const attempt of board.attempts) {
    if (attempt[4] <= t) found = attempt;
  }
  return found;
}
