/** The episodes, by outcome and by words; only those on the screen are on the page. */

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { kinds } from "./episodes";
import { episode, kind, listed, openEpisode, overview, text } from "./store";
import type { EpisodeLine } from "./types";

const ROW = 40;
const OVERSCAN = 8;

export function EpisodeList() {
  const lines = overview.value?.episodes ?? [];
  return (
    <section class="panel episodes" aria-label="Episodes">
      <div class="kinds" role="group" aria-label="Which episodes">
        {kinds(lines).map(([name, count]) => (
          <button key={name} type="button" class={`chip ${name.replace(" ", "_")}`} aria-pressed={kind.value === name} onClick={() => (kind.value = name)}>
            {name || "all"} <span class="count">{count}</span>
          </button>
        ))}
      </div>
      <input
        type="search"
        placeholder="task, step or #number"
        aria-label="Find episodes"
        value={text.value}
        onInput={(event) => (text.value = event.currentTarget.value)}
      />
      <Rows lines={listed.value} />
    </section>
  );
}

function Rows({ lines }: { lines: readonly EpisodeLine[] }) {
  const scroll = useRef<HTMLDivElement>(null);
  const top = useSignal(0);
  const height = useSignal(600);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => {
      if (entry) height.value = entry.contentRect.height;
    });
    if (scroll.current) observer.observe(scroll.current);
    return () => observer.disconnect();
  }, []);

  const opened = episode.value?.line.episode;
  const place = lines.findIndex((line) => line.episode === opened);
  useEffect(() => {
    const element = scroll.current;
    if (!element || place === -1) return;
    if (place * ROW < element.scrollTop) element.scrollTop = place * ROW;
    if ((place + 1) * ROW > element.scrollTop + element.clientHeight) element.scrollTop = (place + 1) * ROW - element.clientHeight;
  }, [place]);

  const first = Math.max(0, Math.floor(top.value / ROW) - OVERSCAN);
  const last = Math.ceil((top.value + height.value) / ROW) + OVERSCAN;
  return (
    <div class="episode-rows" ref={scroll} onScroll={(event) => (top.value = event.currentTarget.scrollTop)}>
      {lines.length === 0 ? <p class="empty">No episode is like that.</p> : null}
      <ol style={{ height: `${lines.length * ROW}px` }}>
        {lines.slice(first, last).map((line, i) => (
          <li key={line.episode} style={{ top: `${(first + i) * ROW}px` }}>
            <button type="button" class="episode-row" aria-current={line.episode === opened} onClick={() => openEpisode(line.episode)}>
              <i class={`dot ${line.outcome}`} />
              <span class="episode-task" title={line.task}>
                {line.task}
              </span>
              <span class="episode-number">#{line.episode}</span>
              <span class="episode-about">
                {[line.outcome, line.is_given_up && "given up", line.is_review && "review", line.step && `${line.step}, attempt ${line.attempt}`].filter(Boolean).join(" · ")}
              </span>
              <span class="episode-number">{line.num_frames} f</span>
            </button>
          </li>
        ))}
      </ol>
    </div>
  );
}
