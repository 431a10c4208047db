/** The planner's words in full, and what is known of the attempt. */

import { readCommand } from "../format";
import { episode, fps, frame, seekToFrame } from "./store";
import { runAddress } from "./place";
import type { Words } from "./types";

export function Planner() {
  const opened = episode.value;
  if (!opened) return null;
  return (
    <aside class="panel side dataset-side" aria-label="Episode">
      <EpisodeHead />
      {opened.words.length ? <AllWords words={opened.words} /> : <p class="empty">This dataset has no language columns.</p>}
      <Facts />
    </aside>
  );
}

function AllWords({ words }: { words: readonly Words[] }) {
  const at = frame.value;
  return (
    <>
      <h3>In force</h3>
      <dl class="in-force">
        {inForce(words, at).map(({ style, content }) => (
          <div key={style}>
            <dt>{style}</dt>
            <dd>{content}</dd>
          </div>
        ))}
      </dl>
      <h3>Said</h3>
      <ol class="said">
        {words
          .filter(({ style }) => style === "")
          .map((one, i) => (
            <Said key={i} words={one} isFuture={one.frame_index > at} />
          ))}
      </ol>
    </>
  );
}

function inForce(words: readonly Words[], at: number): Words[] {
  const latest = new Map<string, Words>();
  for (const one of words) if (one.style !== "" && one.frame_index <= at) latest.set(one.style, one);
  return [...latest.values()];
}

function Said({ words, isFuture }: { words: Words; isFuture: boolean }) {
  const command = words.role === "user" ? null : readCommand(words.content);
  return (
    <li class={`exchange ${isFuture ? "is-future" : ""}`}>
      <button type="button" class="exchange-time" title="go to this frame" onClick={() => seekToFrame(words.frame_index)}>
        {(words.frame_index / fps.value).toFixed(2)} s<span>{words.role}</span>
      </button>
      <p class={words.role === "user" ? "message" : "reply"}>
        {command ? (
          <>
            <span class={`verb ${command.verb.replace(" ", "-")}`}>{command.verb}</span> {command.text}
          </>
        ) : (
          words.content
        )}
      </p>
    </li>
  );
}

function EpisodeHead() {
  const opened = episode.value;
  if (!opened) return null;
  const { line, facts } = opened;
  const address = runAddress(opened, frame.value);
  return (
    <div class="episode-head">
      <p class="over">
        episode {line.episode}
        {line.step ? ` · step ${line.step} · attempt ${line.attempt}` : ""}
        {line.is_review ? " · redo in its review" : ""}
      </p>
      <h2>{line.task}</h2>
      <p class="chips">
        {line.outcome ? (
          <span class={`chip ${line.outcome}`}>
            <b>{line.outcome}</b>
          </span>
        ) : null}
        {line.is_given_up ? <span class="chip given_up">given up · {facts["give_up_reason"]}</span> : null}
        {address ? (
          <a class="to-run" href={address}>
            Open in the page of the run
          </a>
        ) : opened.identity ? (
          <span class="over">its run is not here: {opened.identity[0]}</span>
        ) : null}
      </p>
    </div>
  );
}

const SHOWN_ABOVE = new Set(["shift", "job", "step", "attempt", "is_review", "outcome", "give_up_reason", "instruction"]);

function Facts() {
  const facts = Object.entries(episode.value?.facts ?? {}).filter(
    ([name, value]) => !SHOWN_ABOVE.has(name) && value !== null && value !== "",
  );
  if (facts.length === 0) return null;
  return (
    <>
      <h3>Attempt</h3>
      <dl class="facts">
        {facts.map(([name, value]) => (
          <div key={name}>
            <dt>{name.replaceAll("_", " ")}</dt>
            <dd>{typeof value === "number" && !Number.isInteger(value) ? value.toFixed(3) : String(value)}</dd>
          </div>
        ))}
      </dl>
    </>
  );
}
