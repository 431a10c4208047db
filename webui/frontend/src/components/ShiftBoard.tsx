/** Shifts x jobs x steps of every robot, as they stood at the clock's moment. */

import { useComputed, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { type StepView, stepsAt } from "../boardState";
import type { Board } from "../types";
import { boards, clock, robots, running, selectedRobot, showAttempt, slowTime, visibleBoards, run } from "../store";

const ROW_HEIGHT = 26;
const OVERSCAN = 4;
const LABELS: Record<string, string> = {
  pending: "not begun",
  running: "running",
  failed: "failed, tried again",
  done: "done",
  given_up: "given up",
  redone: "given up, then redone",
  infra: "simulator broke, tried again",
  cancelled: "cancelled",
};

export function ShiftBoard() {
  const scroll = useRef<HTMLDivElement>(null);
  const range = useSignal<[number, number]>([0, 24]);
  const names = robots.value;

  const measure = () => {
    const element = scroll.current;
    if (!element) return;
    const first = Math.max(0, Math.floor(element.scrollTop / ROW_HEIGHT) - OVERSCAN);
    const last = Math.min(names.length, Math.ceil((element.scrollTop + element.clientHeight) / ROW_HEIGHT) + OVERSCAN);
    if (first !== range.value[0] || last !== range.value[1]) range.value = [first, last];
  };
  useEffect(() => {
    measure();
    const observer = new ResizeObserver(measure);
    if (scroll.current) observer.observe(scroll.current);
    return () => observer.disconnect();
  }, [names.length]);

  const shift = useComputed(() => currentShift(boards.value[selectedRobot.value], slowTime.value)).value;
  useEffect(() => {
    const element = scroll.current?.querySelector<HTMLElement>(`.board-row.selected .shift[data-shift="${shift}"]`);
    if (element && scroll.current) scroll.current.scrollLeft = Math.max(0, element.offsetLeft - scroll.current.clientWidth * 0.6);
  }, [shift, selectedRobot.value]);

  const [first, last] = range.value;
  return (
    <section class="panel board" aria-label="Shift board" key={run.value?.run}>
      <header>
        <h2>Shift board</h2>
        <ul class="legend" aria-label="Legend">
          {["done", "failed", "given_up", "redone", "infra", "running"].map((state) => (
            <li key={state}>
              <i class={`cell ${state}`} />
              {state.replace("_", " ")}
            </li>
          ))}
        </ul>
      </header>
      <div class="board-scroll" ref={scroll} onScroll={measure} tabIndex={0}>
        <div style={names.length > 1 ? { height: `${names.length * ROW_HEIGHT}px` } : {}} class="board-rows" role="group" aria-label="Steps by robot">
          {names.slice(first, last).map((name, place) => (
            <BoardRow key={name} robot={name} top={(first + place) * ROW_HEIGHT} isAlone={names.length === 1} />
          ))}
        </div>
      </div>
    </section>
  );
}

/** A robot in a line; one that is alone has a line per shift. */
function BoardRow({ robot, top, isAlone }: { robot: string; top: number; isAlone: boolean }) {
  useEffect(() => {
    visibleBoards.add(robot);
    return () => {
      visibleBoards.delete(robot);
    };
  }, [robot]);
  // Steps change rarely, the clock sixty times a second: cells are made again only when one differs.
  const states = useComputed(() => {
    const board = boards.value[robot];
    const atWork = clock.value.mode === "live" ? running.value[robot] : undefined;
    return board ? JSON.stringify(stepsAt(board, slowTime.value, atWork)) : "[]";
  });
  const steps = JSON.parse(states.value) as StepView[];
  return (
    <div class={`board-row ${isAlone ? "tall" : ""} ${robot === selectedRobot.value ? "selected" : ""}`} style={{ top: `${top}px` }} role="group" aria-label={robot}>
      <button type="button" class="board-name" onClick={() => (selectedRobot.value = robot)}>
        {robot}
      </button>
      {groupByShift(steps).map(([shift, members]) => (
        <div class="shift" key={shift} data-shift={shift}>
          <span class="shift-number" aria-hidden="true">
            {shift}
          </span>
          {members.map((step, place) => (
            <StepCell key={step.key} step={step} isNewJob={place > 0 && members[place - 1]?.job !== step.job} robot={robot} />
          ))}
        </div>
      ))}
    </div>
  );
}

function StepCell({ step, isNewJob, robot }: { step: StepView; isNewJob: boolean; robot: string }) {
  const attempts = step.numAttempts === 1 ? "1 attempt" : `${step.numAttempts} attempts`;
  const reason = step.reason && step.state !== "pending" ? `, given up: ${step.reason}` : "";
  const label = `${robot} step ${step.key}, ${step.task}: ${LABELS[step.state]}${step.numAttempts ? `, ${attempts}` : ""}${reason}`;
  const { lastAttempt } = step;
  return (
    <button
      type="button"
      class={`cell ${step.state} ${isNewJob ? "new-job" : ""}`}
      title={label}
      aria-label={label}
      disabled={lastAttempt === null}
      onClick={() => lastAttempt && void showAttempt(lastAttempt)}
    >
      {step.numAttempts > 1 ? <span class="tries">{step.numAttempts}</span> : null}
    </button>
  );
}

/** The shift that the robot works in, or reviews. */
function currentShift(board: Board | undefined, t: number): number {
  return board?.hours.filter(([, , start]) => start <= t).at(-1)?.[0] ?? 1;
}

function groupByShift(steps: readonly StepView[]): [number, StepView[]][] {
  const shifts = new Map<number, StepView[]>();
  for (const step of steps) {
    const members = shifts.get(step.shift);
    if (members) members.push(step);
    else shifts.set(step.shift, [step]);
  }
  return [...shifts];
}
