/** Everything that happened, on one time axis: attempts, requests, tokens, machine. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { axisTime, clockTime } from "../format";
import { clock, edge, fitView, hover, pan, run, seekTo, view, zoom } from "../store";
import { type Axis, ticks, toPixel, toTime } from "../timeAxis";
import { AttemptBars } from "./AttemptBars";
import { Icon } from "./icons";
import { RequestLanes } from "./RequestLanes";
import { SeriesCharts } from "./SeriesCharts";

export const GUTTER = 116;

export function Timelines() {
  const body = useRef<HTMLDivElement>(null);
  const width = useSignal(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => {
      if (entry) width.value = Math.max(0, Math.floor(entry.contentRect.width) - GUTTER);
    });
    if (body.current) observer.observe(body.current);
    return () => observer.disconnect();
  }, []);
  const axis: Axis = { from: view.value[0], to: view.value[1], width: width.value };

  return (
    <section class="panel timelines" aria-label="Timelines" key={run.value?.run}>
      <header>
        <h2>Timeline</h2>
        <p class="hint">
          {axisTime(view.value[1] - view.value[0])} shown · scroll to zoom, drag to move, click to go there
        </p>
        <button type="button" class="quiet" onClick={fitView} title="show the whole run">
          <Icon name="fit" /> whole run
        </button>
      </header>
      <TimeInput axis={axis}>
        <div class="timeline-body" ref={body}>
          <Ticks axis={axis} />
          {width.value > 0 ? (
            <>
              <AttemptBars axis={axis} />
              <RequestLanes axis={axis} />
              <SeriesCharts axis={axis} />
            </>
          ) : null}
          <Cursor axis={axis} />
        </div>
      </TimeInput>
    </section>
  );
}

/** Mouse and touch on any of the timelines: hover, click to seek, drag to move, wheel to zoom. */
function TimeInput({ axis, children }: { axis: Axis; children: preact.ComponentChildren }) {
  const element = useRef<HTMLDivElement>(null);
  const latest = useRef(axis);
  latest.current = axis;
  const drag = useRef<{ x: number; moved: boolean } | null>(null);

  const pixelOf = (event: { clientX: number }): number =>
    event.clientX - (element.current?.getBoundingClientRect().left ?? 0) - GUTTER;

  useEffect(() => {
    const target = element.current;
    if (!target) return;
    const onWheel = (event: WheelEvent) => {
      const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      const { from, to, width } = latest.current;
      if (pixelOf(event) < 0) return; // over the labels the wheel scrolls
      event.preventDefault();
      if (isSideways) pan(((event.deltaX || event.deltaY) / width) * (to - from));
      else zoom(Math.exp(event.deltaY * 0.0015), toTime(latest.current, pixelOf(event)));
    };
    target.addEventListener("wheel", onWheel, { passive: false });
    return () => target.removeEventListener("wheel", onWheel);
  }, []);

  return (
    <div
      ref={element}
      class="time-input"
      onPointerDown={(event) => {
        if (event.button === 0 && pixelOf(event) >= 0) drag.current = { x: event.clientX, moved: false };
      }}
      onPointerMove={(event) => {
        const pixel = pixelOf(event);
        hover.value = pixel >= 0 && pixel <= axis.width ? toTime(axis, pixel) : null;
        const { current } = drag;
        if (!current) return;
        const distance = event.clientX - current.x;
        if (!current.moved && Math.abs(distance) < 4) return;
        current.moved = true;
        current.x = event.clientX;
        pan((-distance / axis.width) * (axis.to - axis.from));
      }}
      onPointerUp={(event) => {
        const wasClick = drag.current !== null && !drag.current.moved;
        drag.current = null;
        if (wasClick && !(event.target as Element).closest("button")) seekTo(toTime(axis, pixelOf(event)));
      }}
      onPointerLeave={() => {
        hover.value = null;
        drag.current = null;
      }}
    >
      {children}
    </div>
  );
}

function Ticks({ axis }: { axis: Axis }) {
  const times = axis.width > 0 ? ticks(axis) : [];
  const needsTenths = times.some((t) => !Number.isInteger(Math.round(t * 10) / 10));
  return (
    <div class="ticks" aria-hidden="true">
      {times.map((t) => (
        <span key={t} style={{ left: `${GUTTER + toPixel(axis, t)}px` }}>
          {axisTime(t, needsTenths)}
        </span>
      ))}
    </div>
  );
}

function Cursor({ axis }: { axis: Axis }) {
  const t = clock.value.t;
  const at = toPixel(axis, t);
  const over = hover.value;
  const end = toPixel(axis, edge.value.end);
  return (
    <div class="cursors" aria-hidden="true" style={{ left: `${GUTTER}px` }}>
      {end >= 0 && end < axis.width ? <i class="beyond" style={{ left: `${end}px` }} /> : null}
      {at >= 0 && at <= axis.width ? <i class="cursor" style={{ transform: `translateX(${at}px)` }} /> : null}
      {over !== null ? (
        <i class="hover" style={{ transform: `translateX(${toPixel(axis, over)}px)` }}>
          <span>{clockTime(over)}</span>
        </i>
      ) : null}
    </div>
  );
}
