/** Data for the visible stretch of time: asked again when it moves, at most a few times a second. */

import { type Signal, useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { ask, edge, hasShown, run, shown, tryTo, view } from "./store";

const MIN_ASK_MS = 200;

/** The answer to a windowed question for the current view; the last one while a newer is on its way. */
export function useWindow<T>(type: string, fields: Record<string, unknown>, width: number): Signal<T | null> {
  const data = useSignal<T | null>(null);
  const state = useRef({ key: "", isAsking: false, askedAt: 0, timer: 0 });
  const [from, to] = view.value;
  // Of a run that goes on, what is new on the right edge counts too; of the past nothing changes.
  const revision = edge.value.isLive && edge.value.end < to + 1 ? shown.value?.revision : 0;
  const key = JSON.stringify([run.value?.run, type, fields, from.toFixed(3), to.toFixed(3), width, revision, hasShown.value]);

  useEffect(() => {
    const { current } = state;
    const load = () => {
      clearTimeout(current.timer);
      const wait = current.askedAt + MIN_ASK_MS - performance.now();
      if (width < 1 || !run.value || !hasShown.value || current.key === key) return;
      if (current.isAsking || wait > 0) {
        current.timer = window.setTimeout(load, Math.max(wait, 50));
        return;
      }
      current.key = key;
      current.isAsking = true;
      current.askedAt = performance.now();
      const [from_s, to_s] = view.value;
      void tryTo(ask<T>(type, { ...fields, from_s, to_s, width: Math.round(width) })).then((found) => {
        current.isAsking = false;
        if (found !== undefined) data.value = found;
      });
    };
    load();
    return () => clearTimeout(current.timer);
  }, [key]);
  return data;
}
