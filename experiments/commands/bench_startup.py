"""`dayshift bench startup`: from the command to the first token, and whether the tenth comes as fast."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dayshift.experiments.commands.bench_serving import AsJson, Model
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.planners import default_model_folder


def startup(
    model: Model = DEFAULT_MODEL,
    from_files: Annotated[
        bool, typer.Option(help="Write a shape's weights as safetensors, and start from these.")
    ] = False,
    work_dir: Annotated[
        Path | None, typer.Option(help="Where these files go meanwhile; default: the system's own place.")
    ] = None,
    cold: Annotated[bool, typer.Option(help="Start with an empty Triton cache, and once more.")] = False,
    num_requests: Annotated[int, typer.Option(min=2, help="Requests, one after the other.")] = 10,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 133,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until the server must be ready.")] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Start `dayshift serve` in a process of its own, and time its first requests."""
    from dayshift.engine.bench.startup import measure_startup
    from dayshift.engine.models.formats import load_model_config

    rows = {}
    with stdout_kept_for_json() as print_json, _served(model, from_files, work_dir) as (folder, options):
        serve = ["serve", "--model", str(folder), "--model-name", "bench", "--port", "0", *options]
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | ({"TRITON_CACHE_DIR": empty} if cold else {})
            for name in ("empty cache", "second start") if cold else ("start",):
                rows[name] = measure_startup(
                    serve,
                    environment=environment,
                    vocab_size=load_model_config(folder).vocab_size,
                    num_requests=num_requests,
                    prompt=prompt,
                    timeout_s=timeout,
                )
        if as_json:
            print_json({name: asdict(row) for name, row in rows.items()})
            return
    table = Table("seconds", *rows, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("command to ready", *(f"{row.ready_s:.1f}" for row in rows.values()))
    table.add_row("command to first token", *(f"{row.first_token_s:.1f}" for row in rows.values()))
    for part in next(iter(rows.values())).parts_s:
        table.add_row(f"engine: {part}", *(f"{row.parts_s[part]:.2f}" for row in rows.values()))
    for label, index in (("first", 0), ("last", -1)):
        table.add_row(
            f"TTFT of the {label} request, ms", *(f"{row.ttft_ms[index]:.1f}" for row in rows.values())
        )
    Console().print(table)


@contextmanager
def _served(model: str, from_files: bool, work_dir: Path | None) -> Iterator[tuple[Path, list[str]]]:
    """The model's folder, and what `dayshift serve` must be told of it."""
    from dayshift.engine.bench.dummy_models import SHAPES, write_random_weights, write_shape
    from dayshift.engine.models.folder import resolve_model

    if model not in SHAPES:
        yield default_model_folder() if model == DEFAULT_MODEL else resolve_model(model), []
        return
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        path = write_shape(model, Path(folder))
        if from_files:
            write_random_weights(path)
        yield path, [] if from_files else ["--load-format", "dummy"]
