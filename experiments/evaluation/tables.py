"""What an evaluation says, on a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dayshift.experiments.evaluation.plan import EvaluationPlan
from dayshift.experiments.evaluation.records import EpisodeRecord, EvaluationFolder
from dayshift.experiments.evaluation.statistics import PairedTest, mcnemar, wilson_interval
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.sim.tasks import list_tasks
from dayshift.types import Outcome


def summarize(plan: EvaluationPlan, records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """Success of all and per task, for each arm of `n_action_steps`; infra failures are counted apart."""
    return {
        "policy": plan.policy,
        "suite": plan.suite,
        "instructions": plan.instructions.value,
        "num_planned": len(plan.episodes()),
        "arms": [
            _arm(plan, steps, [record for record in records if record.n_action_steps == steps])
            for steps in plan.n_action_steps
        ],
    }


def _arm(plan: EvaluationPlan, n_action_steps: int | None, records: list[EpisodeRecord]) -> dict[str, Any]:
    return {
        "n_action_steps": n_action_steps,
        **_rate(records),
        "tasks": [
            {
                "task": list_tasks(plan.suite)[task].sentence,
                **_rate([record for record in records if record.task == task]),
            }
            for task in plan.tasks
        ],
    }


def _rate(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    counted = [record for record in records if record.is_robots]
    done = [record for record in counted if record.is_success]
    low, high = wilson_interval(len(done), len(counted))
    return {
        "num_done": len(done),
        "num_episodes": len(counted),
        "success_rate": len(done) / len(counted) if counted else None,
        "wilson_95": [low, high],
        "num_infra": len(records) - len(counted),
        "mean_steps_done": sum(record.num_control_steps for record in done) / len(done) if done else None,
    }


def print_evaluation(console: Console, folder: EvaluationFolder, *, episodes: bool) -> None:
    """The table of tasks and arms, the protocol, and with `episodes` one line for each."""
    plan, records = folder.plan(), folder.records()
    summary = summarize(plan, records)
    table = Table("task", *(_arm_name(arm["n_action_steps"]) for arm in summary["arms"]))
    for row, task in enumerate(plan.tasks):
        cells = [_cell(arm["tasks"][row]) for arm in summary["arms"]]
        table.add_row(list_tasks(plan.suite)[task].sentence, *cells)
    table.add_section()
    table.add_row("all", *(_cell(arm) for arm in summary["arms"]))
    table.add_row("95 % Wilson interval", *(_interval(arm) for arm in summary["arms"]))
    console.print(table)
    if episodes:
        console.print(_episode_table(records))
    num_infra = sum(arm["num_infra"] for arm in summary["arms"])
    if num_infra:
        console.print(f"{num_infra} episodes broke (simulator or server) and count for nothing")
    missing = summary["num_planned"] - len(records)
    if missing:
        console.print(
            f"{missing} episodes have not been run; go on with: dayshift eval --resume {folder.path}"
        )
    console.print(" · ".join(f"{name}: {value}" for name, value in protocol_of(folder).items()))


def protocol_of(folder: EvaluationFolder) -> dict[str, str]:
    """Everything that the numbers depend on."""
    settings = folder.settings()
    plan = folder.plan()
    return {
        "policy": plan.policy,
        **folder.protocol(),
        "init_states": _init_states(plan),
        "instructions": plan.instructions.value,
        "blending": plan.blending.value,
        "pace": plan.pace.value,
        "seed": str(plan.seed),
        "image_size": str(plan.image_size),
        "git": str(settings["environment"]["git"]),
    }


def _init_states(plan: EvaluationPlan) -> str:
    if plan.starts is not None:
        return f"{len(plan.starts)} of a run"
    states = plan.init_states_of(plan.tasks[0])
    return f"{states[0]} to {states[-1]}"


def _episode_table(records: Sequence[EpisodeRecord]) -> Table:
    """One line each; columns that say nothing are left out."""
    rows = [_episode_row(record) for record in sorted(records, key=_episode_order)]
    names = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    table = Table(*names)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _episode_order(record: EpisodeRecord) -> tuple[int, int, int]:
    return record.task, record.n_action_steps or 0, record.trial


def _episode_row(record: EpisodeRecord) -> dict[str, str]:
    held = record.policy_report.get("num_held_steps")
    return {
        "task": record.task_name.replace("_", " "),
        "trial": str(record.trial),
        "init state": str(record.init_state_id),
        "of a chunk": "" if record.n_action_steps is None else str(record.n_action_steps),
        "outcome": record.outcome.value,
        "steps": str(record.num_control_steps),
        "held": "" if held is None else f"{held:.0f}",
        "s": f"{record.wall_s:.1f}",
        "detail": record.detail if record.outcome is Outcome.INFRA else "",
    }


def _arm_name(n_action_steps: int | None) -> str:
    return "done" if n_action_steps is None else f"done, n_action_steps {n_action_steps}"


def _cell(rate: dict[str, Any]) -> str:
    return f"{rate['num_done']}/{rate['num_episodes']}"


def _interval(rate: dict[str, Any]) -> str:
    low, high = rate["wilson_95"]
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def compare(first: EvaluationFolder, second: EvaluationFolder) -> PairedTest:
    """McNemar on the episodes that both have: same task, initial state and fixture poses.

    Raises ConfigError when the two were not run under the same protocol, have no episode in common, or one
    has several arms.
    """
    plans = first.plan(), second.plan()
    for name in ("suite", "max_steps", "image_size"):
        values = [getattr(plan, name) for plan in plans]
        if values[0] != values[1]:
            raise ConfigError(f"--compare: {name} differs: {values[0]} and {values[1]}")
    if any(len(plan.n_action_steps) > 1 for plan in plans):
        raise ConfigError(
            "--compare: an evaluation has several values of n_action_steps; compare single ones"
        )
    outcomes = [
        {_situation(record): record.is_success for record in folder.records() if record.is_robots}
        for folder in (first, second)
    ]
    common = outcomes[0].keys() & outcomes[1].keys()
    if not common:
        raise ConfigError("--compare: the two evaluations have no episode in common")
    return mcnemar([(outcomes[0][key], outcomes[1][key]) for key in sorted(common, key=str)])


def _situation(record: EpisodeRecord) -> tuple[int, int, int]:
    return record.task, record.init_state_id, record.seed


def print_comparison(console: Console, first: EvaluationFolder, second: EvaluationFolder) -> None:
    """The paired table."""
    test = compare(first, second)
    table = Table("", f"{second.path.name} done", "failed")
    table.add_row(f"{first.path.name} done", str(test.both), str(test.only_first))
    table.add_row("failed", str(test.only_second), str(test.neither))
    console.print(table)
    console.print(f"McNemar, exact, two-sided: p = {test.p_value:.4g}")
