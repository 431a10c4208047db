/** A row of bars per robot: every attempt, coloured by its outcome; reviews are underlined. */

import { useCallback, useMemo } from "preact/hooks";
import { edge, robots, running, selectedRobot } from "../store";
import { color } from "../theme";
import { type Axis, toPixel } from "../timeAxis";
import { useWindow } from "../useWindow";
import { Paint } from "./paint";

const MAX_ROWS = 10;
const REVIEW = 4; // added to the code of an attempt in a review
const COLORS = ["done", "failed", "infra"] as const;
interface RobotBars {
  attempts: [number, number, number][]; // start, end, code
  reviews: [number, number | null][];
}
type Bars = Record<string, RobotBars>;

/** The selected robot and those around it. */
function shownRobots(): string[] {
  const names = robots.value;
  if (names.length <= MAX_ROWS) return names;
  const place = Math.max(0, names.indexOf(selectedRobot.value));
  const first = Math.min(Math.max(0, place - MAX_ROWS / 2), names.length - MAX_ROWS);
  return names.slice(first, first + MAX_ROWS);
}

export function AttemptBars({ axis }: { axis: Axis }) {
  const list = shownRobots().join(" ");
  const names = useMemo(() => list.split(" "), [list]);
  const rowHeight = names.length > 4 ? 13 : 18;
  const height = names.length * rowHeight;
  const data = useWindow<Bars>("bars", { robots: names }, axis.width).value;
  const atWork = running.value;
  const end = edge.value.isLive ? edge.value.end : null;

  const draw = useCallback(
    (pen: CanvasRenderingContext2D) => {
      names.forEach((name, row) => {
        const y = row * rowHeight + 1;
        const bar = rowHeight - 4;
        pen.fillStyle = color("review-band");
        for (const [start, until] of data?.[name]?.reviews ?? []) {
          const x = toPixel(axis, start);
          pen.fillRect(x, y - 1, toPixel(axis, until ?? end ?? start) - x, rowHeight - 1);
        }
        for (const [start, until, code] of data?.[name]?.attempts ?? []) {
          const x = toPixel(axis, start);
          const wide = toPixel(axis, until) - x;
          const name = COLORS[code % REVIEW] ?? "done";
          pen.fillStyle = color(code >= REVIEW && name === "done" ? "redone" : name);
          pen.fillRect(x, y, Math.max(1, wide > 4 ? wide - 1 : wide), bar);
        }
        const now = atWork[name];
        if (now && end !== null) {
          const x = toPixel(axis, now.start_s);
          pen.fillStyle = color("running");
          pen.fillRect(x, y + bar / 2 - 1, toPixel(axis, end) - x, 2);
        }
      });
    },
    [data, axis.from, axis.to, axis.width, names, rowHeight, atWork, end && Math.floor(end * 5)],
  );

  return (
    <div class="lane-group">
      <div class="gutter bars-gutter">
        {names.map((name) => (
          <button
            key={name}
            type="button"
            class={name === selectedRobot.value ? "selected" : ""}
            style={{ height: `${rowHeight}px` }}
            onClick={() => (selectedRobot.value = name)}
          >
            {name}
          </button>
        ))}
      </div>
      <Paint width={axis.width} height={height} label={`Attempts of ${names.length} robots over time`} draw={draw} />
    </div>
  );
}

