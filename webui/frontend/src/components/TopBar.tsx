/** Which run this is, how it stands, and what can be done with it. */

import { signal, useSignal } from "@preact/signals";
import { ask, canAct, canLaunch, clock, edge, isConnected, openRun, problem, notice, refreshRuns, run, runs, selectedRobot, shown, tryTo } from "../store";
import { theme, toggleTheme } from "../theme";
import { confirmed, Dialog } from "./dialogs";
import { Icon } from "./icons";
import { StartDialog } from "./StartDialog";
import { refreshTasks, TaskList } from "./TaskList";

export const isHelpOpen = signal(false);

export function TopBar() {
  const isStartOpen = useSignal(false);
  const isSaveOpen = useSignal(false);
  const opened = run.value;
  const isLive = edge.value.isLive;

  const stop = async () => {
    const isSure = await confirmed({
      title: "Stop this run?",
      text: "Attempts that are under way are thrown away; all that is recorded stays, and the run can be resumed.",
      action: "Stop",
    });
    if (isSure && (await tryTo(ask("stop"))) !== undefined) notice.value = "the run is being stopped";
  };
  const resume = async () => {
    if ((await tryTo(ask("resume"))) !== undefined) notice.value = "the run goes on; it appears as live in a moment";
  };

  return (
    <header class="top">
      <a class="brand" href="/" aria-label="Dayshift">
        <img src="/icon.svg" alt="" width={22} height={22} />
        <b>Dayshift</b>
      </a>
      <label class="run-picker">
        <span class="visually-hidden">Run</span>
        <select value={opened?.run ?? ""} onFocus={() => void refreshRuns()} onChange={(event) => void openRun(event.currentTarget.value)}>
          {opened ? null : <option value="">no runs</option>}
          {runs.value.map(({ run: name, may_be_live: mayBeLive }) => (
            <option key={name} value={name}>
              {mayBeLive ? "● " : ""}
              {name}
            </option>
          ))}
        </select>
      </label>
      <Badge />
      <Totals />
      <div class="acts">
        {canLaunch.value ? (
          <button type="button" onClick={() => (isStartOpen.value = true)}>
            <Icon name="plus" /> New run
          </button>
        ) : null}
        {canAct.value && isLive ? (
          <button type="button" onClick={() => void stop()}>
            <Icon name="stop" /> Stop
          </button>
        ) : null}
        {opened && canLaunch.value && !isLive && shown.value?.is_finished === false ? (
          <button type="button" onClick={() => void resume()}>
            <Icon name="play" /> Resume
          </button>
        ) : null}
        {opened && canAct.value ? (
          <button type="button" onClick={() => ((isSaveOpen.value = true), void refreshTasks())}>
            <Icon name="disk" /> Save as
          </button>
        ) : null}
        <button type="button" class="icon-button" aria-label="Keyboard" onClick={() => (isHelpOpen.value = true)}>
          <Icon name="help" />
        </button>
        <button type="button" class="icon-button" aria-label={theme.value === "dark" ? "Light" : "Dark"} onClick={toggleTheme}>
          <Icon name={theme.value === "dark" ? "sun" : "moon"} />
        </button>
      </div>
      {isStartOpen.value ? <StartDialog onClose={() => (isStartOpen.value = false)} /> : null}
      {isSaveOpen.value ? <SaveDialog onClose={() => (isSaveOpen.value = false)} /> : null}
      <Messages />
    </header>
  );
}

function Badge() {
  if (!isConnected.value) return <span class="badge lost">not connected</span>;
  if (!run.value) return null;
  return edge.value.isLive ? <span class="badge live">live</span> : <span class="badge">recorded</span>;
}

function Totals() {
  const totals = shown.value?.totals;
  if (!totals) return <div class="totals" />;
  const waiting = Math.max(0, totals.given_up - totals.redone);
  const numbers: [string, string, string][] = [
    ["steps done", `${totals.done}`, "done"],
    ["given up", `${waiting}`, "given_up"],
    ["redone", `${totals.redone}`, "redone"],
  ];
  return (
    <dl class="totals">
      {numbers.map(([name, value, state]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd class={state}>
            {value}
            {state === "done" ? <small>/{totals.steps}</small> : null}
          </dd>
        </div>
      ))}
      <div class="wide-only">
        <dt>attempts</dt>
        <dd>{totals.attempts}</dd>
      </div>
      <div class="wide-only">
        <dt>planner calls</dt>
        <dd>{totals.calls}</dd>
      </div>
    </dl>
  );
}

function SaveDialog({ onClose }: { onClose(): void }) {
  const { speed, reviewSpeed } = clock.value;
  const filmSpeed = useSignal(Math.max(speed, 20));
  const filmReview = useSignal(Math.max(reviewSpeed, 10));
  const failures = useSignal(true);
  const makeFilm = async () => {
    await tryTo(ask("film", { speed: filmSpeed.value, review_speed: filmReview.value, robot: selectedRobot.value }));
    await refreshTasks();
  };
  const exportRun = async () => {
    await tryTo(ask("export", { only: failures.value ? ["done", "failed"] : ["done"] }));
    await refreshTasks();
  };
  return (
    <Dialog title="Save this run as" onClose={onClose}>
      <section class="save">
        <h3>A film</h3>
        <p class="about">An MP4 of what the page shows: cameras, planner of {selectedRobot.value}, shift board and clock.</p>
        <div class="row">
          <label>
            operation
            <input type="number" min={0.25} max={1000} value={filmSpeed.value} onInput={(event) => (filmSpeed.value = Number(event.currentTarget.value))} />×
          </label>
          <label>
            reviews
            <input type="number" min={0.25} max={1000} value={filmReview.value} onInput={(event) => (filmReview.value = Number(event.currentTarget.value))} />×
          </label>
          <button type="button" class="primary" onClick={() => void makeFilm()}>
            <Icon name="film" /> Make the film
          </button>
        </div>
      </section>
      <section class="save">
        <h3>A training dataset</h3>
        <p class="about">LeRobot v3.0, with the planner's words on every frame.</p>
        <div class="row">
          <label class="check">
            <input type="checkbox" checked={failures.value} onChange={(event) => (failures.value = event.currentTarget.checked)} />
            failed attempts too
          </label>
          <button type="button" class="primary" onClick={() => void exportRun()}>
            <Icon name="disk" /> Export
          </button>
        </div>
      </section>
      <TaskList />
    </Dialog>
  );
}

function Messages() {
  return (
    <div class="messages" aria-live="polite">
      {problem.value ? (
        <p class="message-problem" role="alert">
          {problem.value}
          <button type="button" class="icon-button" aria-label="Dismiss" onClick={() => (problem.value = null)}>
            <Icon name="close" />
          </button>
        </p>
      ) : null}
      {notice.value ? (
        <p class="message-notice">
          {notice.value}
          <button type="button" class="icon-button" aria-label="Dismiss" onClick={() => (notice.value = null)}>
            <Icon name="close" />
          </button>
        </p>
      ) : null}
    </div>
  );
}
