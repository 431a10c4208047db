/** Requests to the engine as lanes: queued, restored, prefill, decode. Many at once: their load. */

import { useSignal } from "@preact/signals";
import { useCallback } from "preact/hooks";
import { clockTime, milliseconds } from "../format";
import { hover, seekTo, showExchange } from "../store";
import { color } from "../theme";
import { type Axis, toPixel, toTime } from "../timeAxis";
import type { LaneRow, Lanes } from "../types";
import { useWindow } from "../useWindow";
import { Paint } from "./paint";

const PARTS = ["waiting", "restore", "prefill", "decode"] as const;
const LANE = 11;
const PROFILE_HEIGHT = 48;

export function RequestLanes({ axis }: { axis: Axis }) {
  const data = useWindow<Lanes>("lanes", {}, axis.width).value;
  const under = useSignal<LaneRow | null>(null);
  const numLanes = Math.max(2, data?.num_lanes ?? 2);
  const height = data?.profile ? PROFILE_HEIGHT : numLanes * LANE + 2;
  const draw = useCallback(
    (pen: CanvasRenderingContext2D) => {
      if (data?.profile) drawProfile(pen, axis, data.profile);
      for (const row of data?.rows ?? []) drawRequest(pen, axis, row);
    },
    [data, axis.from, axis.to, axis.width],
  );

  const find = (event: PointerEvent): LaneRow | null => {
    const box = (event.currentTarget as Element).getBoundingClientRect();
    const t = toTime(axis, event.clientX - box.left);
    const lane = Math.floor((event.clientY - box.top) / LANE);
    const slack = ((axis.to - axis.from) / axis.width) * 4;
    return (data?.rows ?? []).find((row) => row[0] === lane && row[1] - slack <= t && t <= row[2] + slack) ?? null;
  };

  const row = under.value;
  return (
    <div class="lane-group">
      <div class="gutter">
        <span class="gutter-title">engine requests</span>
        <span class="gutter-legend">
          {PARTS.map((part) => (
            <span key={part} title={part}>
              <i class={`part ${part}`} />
              {part}
            </span>
          ))}
        </span>
      </div>
      <div
        class={`lanes ${row ? "can-click" : ""}`}
        style={{ minHeight: `${Math.max(height, 44)}px` }}
        onPointerMove={(event) => (under.value = find(event))}
        onPointerLeave={() => (under.value = null)}
        onPointerUp={(event) => {
          const found = find(event);
          if (!found) return;
          event.stopPropagation();
          if (found[9] !== null) showExchange(found[8], { idx: found[9] }, found[2]);
          else seekTo(found[1]);
        }}
      >
        <Paint width={axis.width} height={height} label="Requests to the engine over time" draw={draw} />
        {row && hover.value !== null ? (
          <p class="tip" style={{ ...beside(axis, toPixel(axis, row[1])), top: `${height + 2}px` }}>
            <b>
              {row[7]}
              {row[9] === null ? "" : ` #${row[9]}`}
            </b>{" "}
            {clockTime(row[1])} · {milliseconds(row[2] - row[1])} (
            {PARTS.map((part, place) => [part, row[3 + place] as number] as const)
              .filter(([, seconds]) => seconds > 0)
              .map(([part, seconds]) => `${part} ${milliseconds(seconds)}`)
              .join(", ")}
            )
          </p>
        ) : null}
      </div>
    </div>
  );
}

/** To the right of a pixel, or in the right half of the axis to its left. */
function beside(axis: Axis, pixel: number): { left: string } | { right: string } {
  return pixel > axis.width / 2 ? { right: `${axis.width - pixel}px` } : { left: `${Math.max(0, pixel)}px` };
}

function drawRequest(pen: CanvasRenderingContext2D, axis: Axis, row: LaneRow): void {
  const [lane, sent, answered] = row;
  const y = lane * LANE + 2;
  const scale = axis.width / (axis.to - axis.from);
  const whole = Math.max(2, (answered - sent) * scale);
  let x = toPixel(axis, sent);
  if (whole <= 3) {
    // Too short to divide: the part that took longest stands for it.
    const longest = PARTS.map((part, place) => [row[3 + place] as number, part] as const).sort((a, b) => b[0] - a[0])[0];
    pen.fillStyle = color(`part-${longest?.[1] ?? "waiting"}`);
    pen.fillRect(x, y, whole, LANE - 3);
    return;
  }
  PARTS.forEach((part, place) => {
    const wide = (row[3 + place] as number) * scale;
    pen.fillStyle = color(`part-${part}`);
    pen.fillRect(x, y, wide, LANE - 3);
    x += wide;
  });
}

function drawProfile(pen: CanvasRenderingContext2D, axis: Axis, profile: NonNullable<Lanes["profile"]>): void {
  const times = profile.t;
  const sums = times.map((_, i) => PARTS.reduce((sum, part) => sum + (profile[part][i] ?? 0), 0));
  const top = Math.max(...sums, 1e-9);
  const wide = times.length > 1 ? toPixel(axis, times[1] as number) - toPixel(axis, times[0] as number) : 3;
  times.forEach((t, i) => {
    let y = PROFILE_HEIGHT;
    for (const part of [...PARTS].reverse()) {
      const tall = ((profile[part][i] ?? 0) / top) * (PROFILE_HEIGHT - 4);
      pen.fillStyle = color(`part-${part}`);
      pen.fillRect(toPixel(axis, t) - wide / 2, y - tall, wide + 0.5, tall);
      y -= tall;
    }
  });
}
