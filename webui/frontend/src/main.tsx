import { render } from "preact";
import { signal } from "@preact/signals";
import "uplot/dist/uPlot.min.css";
import "./style/tokens.css";
import "./style/base.css";
import "./style/layout.css";
import "./style/stage.css";
import "./style/timelines.css";
import "./style/side.css";
import "./style/dialogs.css";
import "./style/small.css";
import { ConfirmDialog, KeyHelp } from "./components/dialogs";
import { Log } from "./components/Log";
import { Sessions } from "./components/Sessions";
import { ShiftBoard } from "./components/ShiftBoard";
import { StepPanel } from "./components/StepPanel";
import { Talk } from "./components/Talk";
import { Tiles } from "./components/Tiles";
import { Timelines } from "./components/Timelines";
import { isHelpOpen, TopBar } from "./components/TopBar";
import { Transport } from "./components/Transport";
import { KEYS, listenToKeys } from "./keyboard";
import { awaited, connect, isConnected, robots, run, selectedRobot } from "./store";

const TABS = { planner: "Planner", log: "Log", sessions: "Sessions" } as const;
const tab = signal<keyof typeof TABS>("planner");

function Page() {
  return (
    <>
      <TopBar />
      {run.value ? <Panels /> : <Welcome />}
      <Transport />
      {isHelpOpen.value ? <KeyHelp keys={KEYS} onClose={() => (isHelpOpen.value = false)} /> : null}
      <ConfirmDialog />
    </>
  );
}

function Panels() {
  return (
    <main>
      <div class={`stage ${robots.value.length === 1 ? "one" : ""}`}>
        <Tiles />
        <ShiftBoard />
        <Timelines />
      </div>
      <aside class="panel side" aria-label="Planner, log and sessions">
        <div class="tabs" role="tablist">
          {(Object.keys(TABS) as (keyof typeof TABS)[]).map((name) => (
            <button key={name} type="button" role="tab" aria-selected={tab.value === name} onClick={() => (tab.value = name)}>
              {TABS[name]}
              {name === "planner" ? <small> {selectedRobot.value}</small> : null}
            </button>
          ))}
        </div>
        <div class="tab-body" role="tabpanel" aria-label={TABS[tab.value]}>
          {tab.value === "planner" ? <Talk /> : tab.value === "log" ? <Log /> : <Sessions />}
        </div>
        <StepPanel />
      </aside>
    </main>
  );
}

function Welcome() {
  return (
    <main class="welcome">
      <p role="status">{!isConnected.value ? "Connecting …" : (awaited.value ?? "There is no run to show yet. Start one with: dayshift run quickstart --ui")}</p>
    </main>
  );
}

const place = document.getElementById("page");
if (place) render(<Page />, place);
listenToKeys();
connect();
