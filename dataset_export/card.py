"""The dataset card (README.md) of an exported dataset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dayshift.dataset_export.dataset_files import DatasetMeta


def dataset_card(meta: DatasetMeta, protocols: Sequence[Mapping[str, Any]]) -> str:
    """Markdown with the front matter of the Hugging Face hub: what is in it, how it was made, success."""
    info = meta.info
    lines = [
        "---",
        "task_categories:",
        "- robotics",
        "tags:",
        "- LeRobot",
        "configs:",
        "- config_name: default",
        "  data_files: data/*/*.parquet",
        "---",
        "",
        f"{info.total_episodes} episodes, {info.total_frames} frames at {info.fps} Hz, "
        f"{info.total_tasks} tasks, in LeRobot's format {info.codebase_version}. Every episode is one "
        "attempt of a simulated robot, led by a planner model, at one job step; failed attempts are in "
        "it, and so are the ones that make up for them later (`is_review`).",
        "",
        "## Success",
        "",
        "| task | attempts | done | failed | of those in reviews |",
        "|---|---|---|---|---|",
        *_success_rows(meta.attempts),
        "",
        "## Protocol",
        "",
        *_protocol_rows(protocols),
        "",
        "## Beside LeRobot's own columns",
        "",
        "* `meta/attempts.parquet`, and the same columns in `meta/episodes`: run, robot, shift, job, step, "
        "attempt, outcome, why a step was given up, seed, initial state, fault, planner and its tokens.",
        "* `next.reward`, `next.success`, `next.done` on every frame; `recorded_at` is the measured time "
        "in seconds of the run, `attempt_id` says which attempt a frame is from.",
        "* `language_persistent`, `language_events`, if they are there: plan, subtask and memory; the "
        "exchanges with the planner, its commands as `tool_calls`.",
        "",
    ]
    return "\n".join(lines)


def _success_rows(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    by_task: dict[str, Counter[str]] = {}
    for attempt in attempts:
        counts = by_task.setdefault(attempt["task"], Counter())
        counts[attempt["outcome"]] += 1
        counts["review"] += attempt["is_review"]
    total = sum(by_task.values(), Counter())
    return [
        f"| {task} | {counts['done'] + counts['failed'] + counts['infra']} | {counts['done']} "
        f"| {counts['failed']} | {counts['review']} |"
        for task, counts in [*sorted(by_task.items()), ("**all**", total)]
    ]


def _protocol_rows(protocols: Sequence[Mapping[str, Any]]) -> list[str]:
    """Each setting with every value it had."""
    values: dict[str, list[str]] = {}
    for protocol in protocols:
        for name, value in protocol.items():
            text = value if isinstance(value, str) else json.dumps(value)
            if text not in values.setdefault(name, []):
                values[name].append(text)
    return [f"* {name}: {', '.join(texts)}" for name, texts in values.items()]
