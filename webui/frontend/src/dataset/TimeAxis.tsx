/** The one time axis: curves and words above each other, one cursor through all of them. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { axisTime } from "../format";
import { type Axis, ticks, toPixel, toTime } from "../timeAxis";
import { Curves } from "./Curves";
import { clock, edge, episode, fps, frameAt, hover, seekTo } from "./store";
import { WordLanes } from "./WordLanes";

const GUTTER = 132; // as in dataset.css

export function TimeAxis() {
  const body = useRef<HTMLDivElement>(null);
  const width = useSignal(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => {
      if (entry) width.value = Math.max(0, Math.floor(entry.contentRect.width) - GUTTER);
    });
    if (body.current) observer.observe(body.current);
    return () => observer.disconnect();
  }, []);
  const axis: Axis = { from: 0, to: Math.max(edge.value.end, 1 / fps.value), width: width.value };
  return (
    <section class="panel timelines" aria-label="Curves and words" key={episode.value?.line.episode}>
      <TimeInput axis={axis}>
        <div class="timeline-body" ref={body}>
          <div class="ticks" aria-hidden="true">
            {width.value > 0 && ticks(axis).map((t) => <span style={{ left: `${GUTTER + toPixel(axis, t)}px` }}>{axisTime(t)}</span>)}
          </div>
          {width.value > 0 ? (
            <>
              <WordLanes axis={axis} />
              <Curves axis={axis} />
            </>
          ) : null}
          <Cursor axis={axis} />
        </div>
      </TimeInput>
    </section>
  );
}

/** Mouse and touch on any of the lanes: hover, press or drag to go there. */
function TimeInput({ axis, children }: { axis: Axis; children: preact.ComponentChildren }) {
  const element = useRef<HTMLDivElement>(null);
  const isDragging = useRef(false);
  const pixelOf = (event: PointerEvent): number => event.clientX - (element.current?.querySelector(".timeline-body")?.getBoundingClientRect().left ?? 0) - GUTTER;
  const isInside = (pixel: number) => pixel >= 0 && pixel <= axis.width;
  return (
    <div
      ref={element}
      class="time-input"
      onPointerDown={(event) => {
        const pixel = pixelOf(event);
        if (event.button !== 0 || !isInside(pixel) || (event.target as Element).closest("button")) return;
        isDragging.current = true;
        seekTo(toTime(axis, pixel));
      }}
      onPointerMove={(event) => {
        const pixel = pixelOf(event);
        hover.value = isInside(pixel) ? toTime(axis, pixel) : null;
        if (isDragging.current) seekTo(toTime(axis, Math.min(Math.max(pixel, 0), axis.width)));
      }}
      onPointerUp={() => (isDragging.current = false)}
      onPointerLeave={() => {
        hover.value = null;
        isDragging.current = false;
      }}
    >
      {children}
    </div>
  );
}

function Cursor({ axis }: { axis: Axis }) {
  const over = hover.value;
  return (
    <div class="cursors" aria-hidden="true">
      <i class="cursor" style={{ transform: `translateX(${toPixel(axis, clock.value.t)}px)` }} />
      {over === null ? null : (
        <i class="hover" style={{ transform: `translateX(${toPixel(axis, over)}px)` }}>
          <span>
            {over.toFixed(2)} s · frame {frameAt(over)}
          </span>
        </i>
      )}
    </div>
  );
}
