/** Play, pause, scrub, step, speed, jump. */

import { SPEEDS, isInReview } from "../clock";
import { clockTime } from "../format";
import { clock, edge, goLive, jump, seekTo, selectedHours, setReviewSpeed, setSpeed, stepFrame, togglePlay } from "../store";
import { Icon } from "./icons";

const JUMPS = [
  ["failure", "F"],
  ["review", "R"],
  ["recall", "M"],
] as const;

export function Transport() {
  const { t, mode, speed, reviewSpeed } = clock.value;
  const { end, isLive } = edge.value;
  const inReview = isInReview(selectedHours.value, t);
  return (
    <footer class="transport" aria-label="Transport">
      <div class="buttons">
        <button type="button" class="icon-button" aria-label="One frame back" title="One frame back (←)" onClick={() => void stepFrame(-1)}>
          <Icon name="back" />
        </button>
        <button type="button" class="play" aria-label={mode === "pause" ? "Play" : "Pause"} title="Play or pause (space)" onClick={togglePlay}>
          <Icon name={mode === "pause" ? "play" : "pause"} />
        </button>
        <button type="button" class="icon-button" aria-label="One frame on" title="One frame on (→)" onClick={() => void stepFrame(1)}>
          <Icon name="forward" />
        </button>
      </div>
      <output class="clock" aria-label="Run clock">
        {clockTime(t)}
        <small> / {clockTime(end, 0)}</small>
      </output>
      <Scrubber t={t} end={end} />
      <div class="jumps" role="group" aria-label="Jump to">
        {JUMPS.map(([kind, key]) => (
          <span class="jump" key={kind}>
            <button type="button" aria-label={`Previous ${kind}`} title={`Previous ${kind} (shift ${key})`} onClick={() => void jump(kind, false)}>
              ‹
            </button>
            <button type="button" aria-label={`Next ${kind}`} title={`Next ${kind} (${key})`} onClick={() => void jump(kind, true)}>
              <i class={`dot ${kind}`} />
              {kind} ›
            </button>
          </span>
        ))}
      </div>
      <div class="speeds">
        <Speed label="speed" value={speed} isActive={mode === "play" && !inReview} onChange={setSpeed} />
        <Speed label="in reviews" value={reviewSpeed} isActive={mode === "play" && inReview} onChange={setReviewSpeed} />
      </div>
      {isLive ? (
        <button type="button" class={`go-live ${mode === "live" ? "on" : ""}`} aria-pressed={mode === "live"} onClick={goLive} title="Follow the run (L)">
          <i class="dot live" /> Live
        </button>
      ) : null}
    </footer>
  );
}

const STEP = 0.01;

function Scrubber({ t, end }: { t: number; end: number }) {
  return (
    <input
      class="scrubber"
      type="range"
      min={0}
      max={Math.max(end, 0.001)}
      step={STEP}
      value={t}
      aria-label="Moment of the run"
      aria-valuetext={clockTime(t)}
      style={{ "--done": `${end > 0 ? (100 * t) / end : 0}%` }}
      onInput={(event) => {
        const wanted = Number(event.currentTarget.value);
        seekTo(wanted > end - STEP ? end : wanted); // the last moment is rarely a whole step
      }}
    />
  );
}

function Speed({ label, value, isActive, onChange }: { label: string; value: number; isActive: boolean; onChange(speed: number): void }) {
  return (
    <label class={isActive ? "active" : ""}>
      <span>{label}</span>
      <select aria-label={label} value={String(value)} onChange={(event) => onChange(Number(event.currentTarget.value))}>
        {SPEEDS.map((speed) => (
          <option key={speed} value={String(speed)}>
            {speed}×
          </option>
        ))}
      </select>
    </label>
  );
}
