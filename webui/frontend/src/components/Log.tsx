/** The log, by range: only the lines on the screen are on the page. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { clockTime } from "../format";
import { ask, edge, focusedExchange, run, seekTo, selectedRobot, showAttempt, shown, slowTime, tryTo } from "../store";
import type { LogChunk, LogLine } from "../types";

const LINE = 22;
const OVERSCAN = 20;

export function Log() {
  const scroll = useRef<HTMLDivElement>(null);
  const chunk = useSignal<LogChunk | null>(null);
  const current = useSignal(-1);
  const isFollowing = useSignal(true);
  const asked = useRef("");
  const ours = useRef(false); // the scroll that comes is our own
  const numLines = chunk.value?.num_lines ?? run.value?.num_lines ?? 0;

  const load = async (force = false) => {
    const element = scroll.current;
    if (!element || !run.value) return;
    const first = Math.max(0, Math.floor(element.scrollTop / LINE) - OVERSCAN);
    const count = Math.ceil(element.clientHeight / LINE) + 2 * OVERSCAN;
    const key = `${run.value.run}/${first}/${count}`;
    if (!force && key === asked.current) return;
    asked.current = key;
    const found = await tryTo(ask<LogChunk>("log", { first, count }));
    if (found && asked.current === key) chunk.value = found;
  };

  const showLine = (line: number) => {
    const element = scroll.current;
    if (!element) return;
    ours.current = true;
    element.scrollTop = Math.max(0, (line + 3) * LINE - element.clientHeight);
    void load();
  };

  // The line of the clock's moment; the list follows it until the user scrolls away.
  const moment = slowTime.value;
  const revision = shown.value?.revision;
  useEffect(() => {
    let isOver = false;
    const find = async () => {
      const found = await tryTo(ask<{ line: number; num_lines: number }>("log_place", { t: moment }));
      if (!found || isOver) return;
      current.value = found.line;
      if (chunk.value && found.num_lines !== chunk.value.num_lines) await load(true);
      if (isFollowing.value) showLine(found.line);
      else await load();
    };
    const timer = setTimeout(() => void find(), 60);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [moment, revision, run.value?.run]);

  const lines = chunk.value?.lines ?? [];
  const first = chunk.value?.first ?? 0;
  return (
    <div class="log">
      <div
        class="log-scroll"
        ref={scroll}
        tabIndex={0}
        role="log"
        aria-label="Log"
        onScroll={() => {
          if (!ours.current) isFollowing.value = false;
          ours.current = false;
          void load();
        }}
      >
        <div style={{ height: `${numLines * LINE}px` }} class="log-lines">
          {lines.map((line, place) => (
            <LogRow key={first + place} line={line} top={(first + place) * LINE} isPast={first + place <= current.value} />
          ))}
          {current.value >= 0 ? <i class="log-now" style={{ top: `${(current.value + 1) * LINE}px` }} /> : null}
        </div>
      </div>
      {isFollowing.value ? null : (
        <button type="button" class="follow" onClick={() => {
            isFollowing.value = true;
            showLine(current.value);
          }}>
          follow the clock
        </button>
      )}
      {numLines === 0 ? <p class="empty">Nothing has been logged{edge.value.isLive ? " yet" : ""}.</p> : null}
    </div>
  );
}

function LogRow({ line, top, isPast }: { line: LogLine; top: number; isPast: boolean }) {
  const [t, robot, kind, text, target] = line;
  const open = () => {
    selectedRobot.value = robot;
    if (typeof target === "string") void showAttempt(target);
    else {
      seekTo(t);
      if (typeof target === "number") focusedExchange.value = target;
    }
  };
  return (
    <button type="button" class={`log-row ${kind} ${isPast ? "" : "is-future"}`} style={{ top: `${top}px` }} onClick={open} title={text}>
      <time>{clockTime(t)}</time>
      <span class="log-robot">{robot}</span>
      <i class={`dot ${kind}`} />
      <span class="log-text">{text}</span>
    </button>
  );
}
