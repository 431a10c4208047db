"""The results of runs: scores from the records, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dayshift.dataset_export.store import DATABASE, RunStore, database_url
from dayshift.dataset_export.tables import RecordingRow
from dayshift.experiments.config import Experiment
from dayshift.experiments.folders import RESULTS, RunFolder
from dayshift.experiments.plan import robot_name
from dayshift.experiments.records import DatabaseStore
from dayshift.planner.scores import compute_scores
from dayshift.types import DayshiftError

Results = dict[str, Any]  # what `--json` prints for one run


def compute_results(run: RunFolder, rows: RunStore) -> Results:
    """Everything about a run, finished or not, that its records say."""
    experiment = run.arm.experiment
    store = DatabaseStore(rows)
    records = [store.load(robot_name(number)) for number in range(1, experiment.robots.live + 1)]
    reviews_planned = experiment.robots.live * len(experiment.plan.shape)
    reviews_over = sum(hours.is_review and hours.end_s is not None for r in records for hours in r.hours)
    return {
        "run_dir": str(run.path),
        "label": run.arm.label,
        "is_finished": reviews_over == reviews_planned,
        "planner_model": experiment.planner.model,
        "planner_memory": experiment.planner.memory.value,
        "seed": experiment.seed,
        **asdict(compute_scores(records)),
        "run_s": max(robot.last_s for robot in records),
        "simulator": describe_simulator(experiment, rows),
    }


def open_rows(run: RunFolder) -> RunStore:
    """The run's database; made when it isn't there. Use as a context manager."""
    return RunStore(run.arm.experiment.record.database or database_url(run.path), run.path.name)


def read_results(run: RunFolder) -> Results:
    """The results of a run that somebody else runs, or has run. Raises DayshiftError when there are none."""
    if run.arm.experiment.record.database is None and not (run.path / DATABASE).is_file():
        raise DayshiftError(f"{run.path}: nothing is recorded yet")
    with open_rows(run) as rows:
        return compute_results(run, rows)


def describe_simulator(experiment: Experiment, rows: RunStore) -> dict[str, Any]:
    """The protocol that the numbers were made under, as the simulator recorded it."""
    recordings = rows.rows(RecordingRow)
    protocol = dict(recordings[-1].protocol) if recordings else {}
    return {**protocol, "policy": experiment.policy.kind, "max_steps": experiment.sim.max_steps}


def save_results(run: RunFolder, results: Results) -> None:
    """Leaves the results beside the records."""
    text = json.dumps(results, indent=2, ensure_ascii=False) + "\n"
    (run.path / RESULTS).write_text(text, encoding="utf-8")


_ROWS: tuple[tuple[str, str], ...] = (
    ("planner", "{planner_model} · {planner_memory}"),
    ("steps completed", "{steps_completed} of {steps_total}"),
    ("given-up steps redone", "{redone} of {given_up} ({retried} tried again)"),
    ("review answers correct", "{review_answers_correct} of {reviews}"),
    ("redone, never given up", "{false_redo}"),
    ("attempts", "{attempts} ({infra_attempts} broke)"),
    ("planner calls", "{planner_calls} ({refused_replies} refused, {planner_failures} failed)"),
    ("prompt tokens computed per call", "{prompt_tokens_computed_per_call:.0f}"),
    ("tokens recalled", "{recalled_tokens}"),
    ("time", "{run_s:.0f} s"),
)


def print_table(results: Sequence[Results]) -> None:
    """Runs side by side, on stdout."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for result in results:
        table.add_column(result["label"] or Path(result["run_dir"]).name)
    for name, form in _ROWS:
        table.add_row(name, *(form.format(**result) for result in results))
    console = Console(highlight=False)
    console.print(table)
    protocol = results[0]["simulator"]
    console.print("simulator: " + ", ".join(f"{key} {value}" for key, value in protocol.items()), style="dim")
    for result in results:
        if not result["is_finished"]:
            console.print(f"not finished: dayshift run --resume {result['run_dir']}", style="yellow")
