"""The results of runs: scores from the records, as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dayshift.dataset_export.store import DATABASE, RunStore, open_records
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
    return open_records(run.path, run.arm.experiment.record.database)


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


_SUMS = (
    "steps_total", "steps_completed", "given_up", "retried", "redone", "false_redo", "reviews",
    "review_answers_correct", "attempts", "infra_attempts", "planner_calls", "planner_failures",
    "refused_replies", "recalled_tokens", "run_s",
)  # fmt: skip
_MEANS_PER_CALL = ("prompt_tokens_computed_per_call", "latency_s_per_call")


def pool_seeds(runs: Sequence[RunFolder], results: Sequence[Results]) -> list[Results]:
    """Sums over the runs that differ in nothing but their seed, for each such group of two or more."""
    groups: dict[Experiment, list[Results]] = {}
    for run, result in zip(runs, results, strict=True):
        groups.setdefault(run.arm.experiment.model_copy(update={"seed": 0}), []).append(result)
    return [_pool(group) for group in groups.values() if len(group) > 1]


def _pool(group: Sequence[Results]) -> Results:
    first = group[0]
    pooled: Results = {key: sum(result[key] for result in group) for key in _SUMS}
    num_calls = pooled["planner_calls"] or 1
    for key in _MEANS_PER_CALL:
        pooled[key] = sum(result[key] * result["planner_calls"] for result in group) / num_calls
    return {
        "label": f"{len(group)} seeds",
        "seeds": [result["seed"] for result in group],
        "is_finished": all(result["is_finished"] for result in group),
        **{key: first[key] for key in ("planner_model", "planner_memory", "simulator")},
        **pooled,
    }


_WIDTH_OF_FILES = 200  # columns, where stdout is no terminal
_ROWS: tuple[tuple[str, str], ...] = (
    ("planner", "{planner_model}"),
    ("memory", "{planner_memory}"),
    ("steps completed", "{steps_completed} of {steps_total}"),
    ("steps given up", "{given_up}"),
    ("  tried again in reviews", "{retried}"),
    ("  redone", "{redone} of {given_up}"),
    ("review answers correct", "{review_answers_correct} of {reviews}"),
    ("redone, never given up", "{false_redo}"),
    ("attempts", "{attempts}"),
    ("  broke", "{infra_attempts}"),
    ("planner calls", "{planner_calls}"),
    ("  replies refused", "{refused_replies}"),
    ("  without a reply", "{planner_failures}"),
    ("prompt tokens computed per call", "{prompt_tokens_computed_per_call:.0f}"),
    ("tokens recalled", "{recalled_tokens}"),
    ("time", "{run_s:.0f} s"),
)


def print_table(runs: Sequence[RunFolder], results: Sequence[Results]) -> None:
    """Runs side by side on stdout, then sums over seeds."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    columns = [*results, *pool_seeds(runs, results)]
    for column in columns:
        table.add_column(column["label"] or Path(column["run_dir"]).name)
    for name, form in _ROWS:
        table.add_row(name, *(form.format(**column) for column in columns))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    console.print(table)
    protocol = ", ".join(f"{key} {value}" for key, value in results[0]["simulator"].items())
    console.print(f"simulator: {protocol}", style="dim")
    for result in results:
        if not result["is_finished"]:
            console.print(f"not finished: dayshift run --resume {result['run_dir']}", style="yellow")
