/** The planner's words on the time axis: what is in force as bars, messages as marks. */

import { type Axis, toPixel } from "../timeAxis";
import { edge, episode, fps, frame, seekToFrame } from "./store";
import type { Words } from "./types";

export function WordLanes({ axis }: { axis: Axis }) {
  const words = episode.value?.words ?? [];
  const styles = [...new Set(words.map(({ style }) => style))].filter((style) => style !== "");
  const said = [...new Set(words.filter(({ style }) => style === "").map((one) => one.frame_index))];
  if (words.length === 0) return null;
  return (
    <div class="lane-group words">
      <div class="gutter word-gutter">
        {styles.map((style) => (
          <span key={style} class="gutter-title">
            {style}
          </span>
        ))}
        {said.length ? <span class="gutter-title">messages</span> : null}
      </div>
      <div class="word-lanes">
        {styles.map((style) => (
          <Bars key={style} words={words.filter((one) => one.style === style)} axis={axis} />
        ))}
        {said.length ? (
          <div class="word-lane">
            {said.map((at) => (
              <button
                key={at}
                type="button"
                class={`mark ${at <= frame.value ? "" : "is-future"}`}
                style={{ left: `${toPixel(axis, at / fps.value)}px` }}
                aria-label={`messages at frame ${at}`}
                title={words.filter((one) => one.style === "" && one.frame_index === at).map((one) => `${one.role}: ${one.content}`).join("\n")}
                onClick={() => seekToFrame(at)}
              />
            ))}
          </div>
        ) : null}
      </div>
    </div>
  );
}

/** Each text holds until the next of its style, or to the end. */
function Bars({ words, axis }: { words: readonly Words[]; axis: Axis }) {
  return (
    <div class="word-lane">
      {words.map((one, i) => {
        const from = one.frame_index / fps.value;
        const next = words[i + 1];
        const to = next ? next.frame_index / fps.value : edge.value.end;
        const left = toPixel(axis, from);
        return (
          <span key={i} class={`word-bar ${one.style}`} style={{ left: `${left}px`, width: `${Math.max(2, toPixel(axis, to) - left - 1)}px` }} title={one.content}>
            {one.content}
          </span>
        );
      })}
    </div>
  );
}
