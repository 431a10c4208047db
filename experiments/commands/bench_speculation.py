"""`dayshift bench speculation`: steps and time that drafts save on the planner's own conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dayshift.engine.config import Device, DType, EngineConfig
from dayshift.experiments.commands.bench_serving import numbers_of
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.folders import describe_environment
from dayshift.experiments.planners import model_source
from dayshift.planner.protocol import COMMAND_SCHEMA, REVIEW_SCHEMA, SYSTEM_PROMPTS, Dialect
from dayshift.planner.training.operations import OperationShape, TurnKind, make_operation

if TYPE_CHECKING:  # torch, which the other commands do not wait for
    from dayshift.engine.bench.speculation import Conversation, SpeculationRow

_SEED = 20_000_000_007  # of the operations; far from every seed of the planner's training


def speculation(
    model: Annotated[str, typer.Option(help="`default`, a folder, a .gguf file, or a hub's id.")] = (
        DEFAULT_MODEL
    ),
    draft_model: Annotated[
        str | None,
        typer.Option(help="Drafts beside the history: `default`, a folder, a .gguf file, or an id."),
    ] = None,
    at_once: Annotated[str, typer.Option(help="Numbers of sessions called at once, with commas.")] = "1,4",
    turns: Annotated[int, typer.Option(min=1, help="Of a conversation.")] = 40,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a GPU.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compare an engine that drafts with one that does not: planners' replies, and random text."""
    from dayshift.engine.bench.speculation import compare_speculation

    config = EngineConfig(
        model=model_source(model),
        draft_model=None if draft_model is None else model_source(draft_model),
        device=device,
        dtype=dtype,
        kv_cache_bytes=1 << 30,
    )
    sizes = numbers_of("--at-once", at_once)
    conversations = _conversations("compact" if model == DEFAULT_MODEL else "general", max(sizes), turns)
    with stdout_kept_for_json() as print_json:
        rows = list(compare_speculation(config, conversations, sizes))
        if as_json:
            table = [asdict(row) | {"speed_up": row.speed_up} for row in rows]
            print_json(
                {
                    "model": model,
                    "draft_model": draft_model,
                    "environment": describe_environment(),
                    "rows": table,
                }
            )
            return
    _print(rows)


def _conversations(dialect: Dialect, num: int, num_turns: int) -> list[Conversation]:
    """What planners are told in operations of their own, the reviews among it."""
    from dayshift.engine.bench.speculation import Conversation

    shape = OperationShape(num_shifts=4, num_jobs=2, num_steps=3)
    operations = [make_operation(Random(_SEED + number), shape) for number in range(num)]
    return [
        Conversation(
            system=SYSTEM_PROMPTS[dialect],
            turns=[
                (turn.user, REVIEW_SCHEMA if turn.kind is TurnKind.REVIEW else COMMAND_SCHEMA)
                for turn in operation.turns[:num_turns]
            ],
        )
        for operation in operations
    ]


def _print(rows: Sequence[SpeculationRow]) -> None:
    table = Table(
        "calls",
        "at once",
        "tokens",
        "steps",
        "drafts kept",
        "draft model's",
        "seconds",
        "speed-up",
        "unlike",
        box=None,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row.workload,
            f"{row.num_at_once}",
            f"{row.num_tokens:,}",
            f"{row.num_steps[0]:,} > {row.num_steps[1]:,}",
            f"{row.num_accepted:,} of {row.num_drafted:,}",
            f"{row.num_accepted_of_model:,} of {row.num_drafted_by_model:,}",
            f"{row.seconds[0]:.1f} > {row.seconds[1]:.1f}",
            f"{row.speed_up:.2f}x",
            f"{row.num_other_replies}",
        )
    Console().print(table)
