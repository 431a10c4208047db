"""`dayshift bench policy`: latency of action chunks, alone and beside decoding planners."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dayshift.engine.config import Device, EngineConfig
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.planners import default_model_folder
from dayshift.experiments.yaml_tree import ConfigError

_NAME = "policy"


def policy(
    checkpoint: Annotated[
        str, typer.Option(help="A SmolVLA checkpoint; `small` or `450m`: random weights of that shape.")
    ] = "small",
    model: Annotated[str, typer.Option(help="The planner's model beside it.")] = DEFAULT_MODEL,
    robots: Annotated[str, typer.Option(help="Numbers of robots, with commas.")] = "1,8,32",
    planners: Annotated[str, typer.Option(help="Numbers of planner sessions that decode meanwhile.")] = "0",
    n_action_steps: Annotated[
        int | None,
        typer.Option(min=1, help="Ask as often as a robot at 20 Hz that uses so many; default: at once."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 10.0,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a GPU.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure how long robots wait for chunks, and planners for tokens, through the HTTP server."""
    from dayshift.engine.server import running_server
    from dayshift.experiments.policy_bench import BenchRow, measure
    from dayshift.policy.serving import smolvla_source
    from dayshift.policy.smolvla.dummy import SHAPES, write_dummy_checkpoint

    counts = [(r, p) for p in _numbers("--planners", planners) for r in _numbers("--robots", robots)]
    rows: list[BenchRow] = []
    with stdout_kept_for_json() as print_json, ExitStack() as stack:
        folder = checkpoint
        if checkpoint in SHAPES:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dayshift-bench-"))
            write_dummy_checkpoint(Path(folder), checkpoint)
        config = EngineConfig(
            model=str(default_model_folder()) if model == DEFAULT_MODEL else model,
            device=device,
            policies=(smolvla_source(_NAME, folder, device=device),),
        )
        url = stack.enter_context(running_server(config))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        bar = progress.add_task("policy", total=len(counts))
        for num_robots, num_planners in counts:
            row = measure(
                url,
                _NAME,
                num_robots=num_robots,
                num_planners=num_planners,
                seconds=seconds,
                n_action_steps=n_action_steps,
            )
            rows.append(row)
            progress.advance(bar)
        if as_json:
            print_json({"checkpoint": checkpoint, "model": model, "rows": [asdict(row) for row in rows]})
    if not as_json:
        _print(rows)


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"{option}: found {text!r}, allowed: whole numbers with commas")
    return [int(word) for word in words]


def _print(rows: list) -> None:
    table = Table(
        "robots",
        "planners",
        "chunks/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "infer p50",
        "batch",
        "token p50",
        "p99",
    )
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        numbers = (
            row.chunks_per_s,
            row.chunk_p50_ms,
            row.chunk_p95_ms,
            row.chunk_p99_ms,
            row.infer_p50_ms,
            row.mean_batch_size,
            row.token_p50_ms,
            row.token_p99_ms,
        )
        cells = ("" if number is None else f"{number:.1f}" for number in numbers)
        table.add_row(str(row.num_robots), str(row.num_planners), *cells)
    Console().print(table)
