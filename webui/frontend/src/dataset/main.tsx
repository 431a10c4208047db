/** The page of a dataset: one episode's cameras, curves and words on one time axis. */

import { render } from "preact";
import "uplot/dist/uPlot.min.css";
import "../style/tokens.css";
import "../style/base.css";
import "../style/layout.css";
import "../style/stage.css";
import "../style/timelines.css";
import "../style/side.css";
import "../style/dialogs.css";
import "../style/small.css";
import "./dataset.css";
import { KeyHelp } from "../components/dialogs";
import { Icon } from "../components/icons";
import { theme, toggleTheme } from "../theme";
import { Cameras } from "./Cameras";
import { EpisodeList } from "./EpisodeList";
import { Planner } from "./Planner";
import { episode, isHelpOpen, overview, problem, start } from "./store";
import { TimeAxis } from "./TimeAxis";
import { KEYS, listenToKeys, Transport } from "./Transport";

function Page() {
  return (
    <>
      <TopBar />
      {episode.value ? (
        <main class="dataset">
          <EpisodeList />
          <div class="stage dataset-stage">
            <Cameras />
            <TimeAxis />
          </div>
          <Planner />
        </main>
      ) : (
        <main class="welcome">
          <p>{problem.value ? "There is nothing to show." : "Opening …"}</p>
        </main>
      )}
      <Transport />
      {isHelpOpen.value ? <KeyHelp keys={KEYS} onClose={() => (isHelpOpen.value = false)} /> : null}
    </>
  );
}

function TopBar() {
  const opened = overview.value;
  const lines = opened?.episodes ?? [];
  const numbers: [string, number][] = [
    ["episodes", lines.length],
    ["frames", lines.reduce((sum, line) => sum + line.num_frames, 0)],
    ["frames per second", opened?.fps ?? 0],
  ];
  return (
    <header class="top">
      <a class="brand" href="/" aria-label="Dayshift: the page of the runs">
        <img src="/icon.svg" alt="" width={22} height={22} />
        <b>Dayshift</b>
      </a>
      <h1 class="dataset-name">{opened?.name ?? ""}</h1>
      <dl class="totals">
        {numbers.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value.toLocaleString("en")}</dd>
          </div>
        ))}
      </dl>
      <div class="acts">
        <button type="button" class="icon-button" aria-label="Keyboard" onClick={() => (isHelpOpen.value = true)}>
          <Icon name="help" />
        </button>
        <button type="button" class="icon-button" aria-label={theme.value === "dark" ? "Light" : "Dark"} onClick={toggleTheme}>
          <Icon name={theme.value === "dark" ? "sun" : "moon"} />
        </button>
      </div>
      <div class="messages" aria-live="polite">
        {problem.value ? (
          <p class="message-problem" role="alert">
            {problem.value}
            <button type="button" class="icon-button" aria-label="Dismiss" onClick={() => (problem.value = null)}>
              <Icon name="close" />
            </button>
          </p>
        ) : null}
      </div>
    </header>
  );
}

const place = document.getElementById("page");
if (place) render(<Page />, place);
listenToKeys();
void start();
