"""The composition root: builds engine, simulators, recorder and planners of a run, and runs it.

    run folder ── config ──► plans, rollouts
    engine process ◄─ HTTP ─ planner clients ┐
    simulator processes ◄─── robots ─────────┼─ one thread per robot: planner.operation
    recorder process ◄────── frames ─────────┘
    run.db ◄──────────────── every record, committed before the next step
    pages ◄── local socket ─ what happens, while somebody looks

A run that was stopped, however it was stopped, goes on with `run_one` on the same folder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial

from dayshift.dataset_export.prerender import PrerenderProcess
from dayshift.dataset_export.repair import repair_run
from dayshift.dataset_export.store import RunStore
from dayshift.dataset_export.tables import EventRow, RobotRow, RunRow
from dayshift.dataset_export.writer_process import RecorderProcess
from dayshift.engine.client import DayshiftClient
from dayshift.experiments.board import Board
from dayshift.experiments.config import Experiment
from dayshift.experiments.engines import Engines
from dayshift.experiments.errors import StoppedByUserError, traceback_kept_in
from dayshift.experiments.folders import RunFolder, describe_environment
from dayshift.experiments.interrupts import INTERRUPT_CHECK_S, raise_if_interrupted
from dayshift.experiments.plan import build_plan, robot_name
from dayshift.experiments.planners import make_planner
from dayshift.experiments.policies import policy_factory
from dayshift.experiments.progress import Progress, make_progress
from dayshift.experiments.records import DatabaseStore
from dayshift.experiments.results import Results, compute_results, open_rows, save_results
from dayshift.experiments.robots import SimulatedRobot
from dayshift.planner.crew import Crew
from dayshift.planner.errors import OperationStoppedError
from dayshift.planner.jobs import Shift
from dayshift.planner.operation import run_operation
from dayshift.planner.rules import Rules
from dayshift.sim.types import CONTROL_HZ
from dayshift.sim.worker import RobotSimulator, SimulatorDiedError
from dayshift.types import DayshiftError, Publish, RunClock, fan_out
from dayshift.webui.monitor import Monitor
from dayshift.webui.publisher import LivePublisher

Operation = Callable[[], object]  # one robot's whole operation
Plans = dict[str, tuple[Shift, ...]]
_STOP_PATIENCE_S = 10.0  # for the robots' threads to notice that the run is over


def run_all(runs: Sequence[RunFolder], engines: Engines) -> list[Results]:
    """Run the arms of an experiment one after the other, or go on with them; returns their results.

    A finished arm is only read. Raises StoppedByUserError after Ctrl-C, and DayshiftError.
    """
    return [run_one(run, engines) for run in runs]


def run_one(run: RunFolder, engines: Engines) -> Results:
    """Run one experiment in its folder, from where it stands to the end."""
    experiment = run.arm.experiment
    plans = {
        robot_name(number): build_plan(experiment, number) for number in range(1, experiment.robots.live + 1)
    }
    with traceback_kept_in(run.path), open_rows(run) as rows:
        results = compute_results(run, rows)
        if not results["is_finished"]:
            try:
                _operate(run, plans, rows, engines)
            except KeyboardInterrupt:
                raise StoppedByUserError(
                    f"interrupted; what is recorded is kept, go on with: dayshift run --resume {run.path}"
                ) from None
            results = compute_results(run, rows)
        save_results(run, results)
        return results


def _operate(run: RunFolder, plans: Plans, rows: RunStore, engines: Engines) -> None:
    """Everything that a run needs is started here, and ended when this returns or raises."""
    experiment = run.arm.experiment
    _describe_run(run, plans, rows)
    repair = repair_run(run.path, rows)
    store, board = DatabaseStore(rows), Board(plans)
    records = [store.load(robot) for robot in plans]
    for robot in records:
        board.take_up(robot)
    with ExitStack() as stack:
        progress = stack.enter_context(make_progress(run.arm.label, board))
        if repair.removed:
            progress.note(str(repair))
        progress.note("starting planner and simulators")
        engine = engines.start(experiment)
        policy = policy_factory(experiment.policy, engine.url if engine else None)
        simulators = [stack.enter_context(RobotSimulator(policy)) for _ in plans]
        _start_simulators(plans, simulators)
        url = engine.url() if engine else experiment.engine.url
        clock = RunClock(offset_s=max(robot.last_s for robot in records))
        pages = stack.enter_context(LivePublisher(run.path, now=clock.now, engine_url=url))
        stack.enter_context(Monitor(run.path, now=clock.now, engine_url=url))
        recorder = stack.enter_context(RecorderProcess(run.path, now=clock.now))
        if experiment.record.prerender:
            stack.enter_context(PrerenderProcess(run.path, experiment.record.database))
        site = _Site(
            experiment=experiment,
            rows=rows,
            store=store,
            engine=stack.enter_context(DayshiftClient(url, timeout_s=experiment.planner.timeout_s))
            if url
            else None,
            engine_url=url,
            clock=clock,
            recorder=recorder,
            publish=fan_out(progress, pages),
        )
        operations = {
            robot: site.operation(number, simulator, plans[robot])
            for number, (robot, simulator) in enumerate(zip(plans, simulators, strict=True), 1)
        }
        stack.callback(_save_waits, recorder, rows, clock)
        _run_in_threads(operations, site.stop, progress)


def _save_waits(recorder: RecorderProcess, rows: RunStore, clock: RunClock) -> None:
    """How often and how long robots waited for the recorder: a line of the run's log."""
    stats = asdict(recorder.stats)
    rows.save(EventRow(run_id=rows.run_id, t=clock.now(), robot="", kind="recorder", body=stats))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """What the robots of a run share."""

    experiment: Experiment
    rows: RunStore
    store: DatabaseStore
    engine: DayshiftClient | None
    engine_url: str | None
    clock: RunClock
    recorder: RecorderProcess
    publish: Publish
    stop: threading.Event = field(default_factory=threading.Event)

    def operation(self, number: int, simulator: RobotSimulator, shifts: Sequence[Shift]) -> Operation:
        """One robot with its planner, ready to go."""
        experiment = self.experiment
        crew = Crew(
            robot_name(number),
            planner=make_planner(
                experiment.planner,
                engine=self.engine,
                engine_url=self.engine_url,
                run_id=self.rows.run_id,
                seed=experiment.seed,
            ),
            executor=SimulatedRobot(
                number,
                experiment,
                simulator=simulator,
                recorder=self.recorder,
                rows=self.rows,
                clock=self.clock,
                publish=self.publish,
                stop=self.stop,
            ),
            store=self.store,
            rules=Rules(**dict(experiment.rules)),
            clock=self.clock,
            publish=self.publish,
            stop=self.stop,
        )
        return partial(run_operation, shifts, crew)


def _start_simulators(plans: Plans, simulators: Sequence[RobotSimulator]) -> None:
    """Starts them now, while the engine loads its model. Raises DayshiftError."""
    for robot, simulator in zip(plans, simulators, strict=True):
        try:
            simulator.start()
        except SimulatorDiedError as error:
            raise DayshiftError(f"{robot}: {error}") from error


def _run_in_threads(operations: dict[str, Operation], stop: threading.Event, progress: Progress) -> None:
    """One thread per robot. The first that fails, or Ctrl-C, stops them all."""
    failures: list[BaseException] = []

    def work(operate: Operation) -> None:
        try:
            operate()
        except OperationStoppedError:
            pass
        except BaseException as error:  # noqa: BLE001  raised again in the main thread
            failures.append(error)
            stop.set()

    threads = [
        threading.Thread(target=work, args=(operate,), name=robot, daemon=True)
        for robot, operate in operations.items()
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                raise_if_interrupted()
                thread.join(INTERRUPT_CHECK_S)
    except KeyboardInterrupt:
        progress.note("stopping")
        stop.set()
        give_up_at = time.monotonic() + _STOP_PATIENCE_S
        for thread in threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        raise
    if failures:
        raise failures[0]


def _describe_run(run: RunFolder, plans: Plans, rows: RunStore) -> None:
    """The run's and the robots' rows; the first start of the run writes them."""
    if rows.rows(RunRow):
        return
    experiment, environment = run.arm.experiment, describe_environment()
    rows.save(
        RunRow(
            run_id=rows.run_id,
            name=experiment.name,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            fps=CONTROL_HZ,
            config_yaml=run.arm.annotated(),
            git_revision=environment["git"],
            versions=environment["versions"],
            seeds={"experiment": experiment.seed},
        ),
        *(
            RobotRow(
                run_id=rows.run_id,
                robot=robot,
                kind="live",
                policy=experiment.policy.kind,
                planner_model=experiment.planner.model,
                planner_memory=experiment.planner.memory.value,
            )
            for robot in plans
        ),
    )
