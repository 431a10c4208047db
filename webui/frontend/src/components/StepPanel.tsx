/** A step in full: its frames, the planner's words, the requests and what was recalled for them. */

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { clockTime, milliseconds } from "../format";
import { ask, clock, openAttempt, seekTo, showAttempt, stepFrame, togglePlay, tryTo } from "../store";
import type { AttemptDetail } from "../types";
import { Icon } from "./icons";
import { ExchangeItem } from "./Talk";

export function StepPanel() {
  const detail = useSignal<AttemptDetail | null>(null);
  const wanted = openAttempt.value;
  useEffect(() => {
    if (!wanted) {
      detail.value = null;
      return;
    }
    void tryTo(ask<AttemptDetail>("attempt", { attempt_id: wanted })).then((found) => {
      if (found && openAttempt.value === wanted) detail.value = found;
    });
  }, [wanted]);
  const found = detail.value;
  if (!wanted || !found) return null;

  const key = `${found.shift}.${found.job}.${found.step}`;
  return (
    <section class="step-panel" aria-label={`Step ${key}`}>
      <header>
        <div>
          <p class="over">
            {found.robot} · step {key}
            {found.is_review ? " · redo in its review" : ""}
          </p>
          <h2>{found.task}</h2>
        </div>
        <button type="button" class="icon-button" aria-label="Close step" onClick={() => (openAttempt.value = null)}>
          <Icon name="close" />
        </button>
      </header>
      <nav class="attempts" aria-label="Attempts">
        {found.siblings.map(([id, number, outcome, isRedo]) => (
          <button key={id} type="button" class={`chip ${outcome}`} aria-pressed={id === found.attempt_id} onClick={() => void showAttempt(id)}>
            {isRedo ? "redo" : "attempt"} {number} <b>{outcome}</b>
          </button>
        ))}
        {found.state === "given_up" ? <span class="chip given_up">given up · {found.reason}</span> : null}
      </nav>
      <FrameSlider detail={found} />
      <dl class="facts">
        <Fact name="time">
          {clockTime(found.start_s)} – {clockTime(found.end_s)}
        </Fact>
        <Fact name="control steps">{found.num_control_steps}</Fact>
        {found.fault ? <Fact name="fault">{found.fault.kind.replace("_", " ")}</Fact> : null}
        {found.init_state_id !== null ? <Fact name="initial state">{found.init_state_id}</Fact> : null}
        {found.seed !== null ? <Fact name="seed">{found.seed}</Fact> : null}
        {found.detail ? <Fact name="detail">{found.detail}</Fact> : null}
      </dl>
      <h3>
        What the planner was told and said <span class="count">{found.talk.length}</span>
      </h3>
      <ol class="talk-list">
        {found.talk.map((one) => (
          <ExchangeItem key={one.idx} exchange={one} t={Number.POSITIVE_INFINITY} isRecalled={false} robot={found.robot} />
        ))}
      </ol>
      {found.talk.length ? <Requests detail={found} /> : null}
    </section>
  );
}

function Fact({ name, children }: { name: string; children: preact.ComponentChildren }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

/** Frame by frame through the attempt; the cameras show the very control step. */
function FrameSlider({ detail }: { detail: AttemptDetail }) {
  const times = detail.frame_times;
  if (times.length === 0) return <p class="empty">No frames: the simulator broke before the first.</p>;
  const { t } = clock.value;
  let index = times.findIndex((one) => one > t) - 1;
  if (index < -1) index = times.length - 1;
  return (
    <div class="frames">
      <button type="button" class="icon-button" aria-label="Frame back" onClick={() => void stepFrame(-1)}>
        <Icon name="back" />
      </button>
      <button type="button" class="icon-button" aria-label="Play or pause" onClick={togglePlay}>
        <Icon name={clock.value.mode === "play" ? "pause" : "play"} />
      </button>
      <button type="button" class="icon-button" aria-label="Frame on" onClick={() => void stepFrame(1)}>
        <Icon name="forward" />
      </button>
      <input
        type="range"
        min={0}
        max={times.length - 1}
        value={Math.max(0, index)}
        aria-label="Frame of the attempt"
        onInput={(event) => seekTo(times[Number(event.currentTarget.value)] ?? t)}
      />
      <output>
        {Math.max(0, index) + 1} / {times.length}
      </output>
    </div>
  );
}

function Requests({ detail }: { detail: AttemptDetail }) {
  return (
    <>
      <h3>Requests</h3>
      <table class="requests">
        <thead>
          <tr>
            <th>#</th>
            <th>sent</th>
            <th>restore</th>
            <th>prefill</th>
            <th>decode</th>
            <th>all</th>
            <th>recalled</th>
          </tr>
        </thead>
        <tbody>
          {detail.talk.map(({ idx, at, ledger, latency_s: latency }) => (
            <tr key={idx}>
              <td>{idx}</td>
              <td>{clockTime(at)}</td>
              <td>{milliseconds((ledger.restore_ms + ledger.recall_ms) / 1000)}</td>
              <td>{milliseconds(ledger.prefill_ms / 1000)}</td>
              <td>{milliseconds(ledger.decode_ms / 1000)}</td>
              <td>{milliseconds(latency)}</td>
              <td>{ledger.recalled ? `${ledger.recalled} tokens` : "–"}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </>
  );
}
