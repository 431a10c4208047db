"""`dayshift bench gguf`: decode steps of quantised models against the bytes that they read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from dayshift.experiments.console import stdout_kept_for_json

if TYPE_CHECKING:  # torch, which the other commands do not wait for
    from dayshift.engine.bench.quantized_decode import QuantizedDecodeRow
    from dayshift.engine.models.seen_on_gpu import SeenModel


_ALL_SHAPES = "llama-3.2-3b-q4_k_m,gpt-oss-20b-mxfp4,qwen3-30b-a3b-q3_k_m,qwen3-32b-q4_k_m"


def gguf(
    shapes: Annotated[str, typer.Option(help="Models of random weights, with commas between.")] = _ALL_SHAPES,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the sequence that decodes.")] = 133,
    repeats: Annotated[int, typer.Option(min=1, help="The median of so many.")] = 3,
    record: Annotated[
        Path | None, typer.Option(help="Note what ran in this file: benchmarks/seen_on_gpu.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Decode of quantised models on a CUDA device, and its share of the read bandwidth of the same run."""
    from dayshift.engine.bench.model_watch import watched_models
    from dayshift.engine.bench.quantized_decode import measure_quantized_decode

    rows: list[QuantizedDecodeRow] = []
    models: list[SeenModel] = []
    console, progress = Console(stderr=as_json), Console(stderr=True)
    with stdout_kept_for_json() as print_json:
        head = f"{'one sequence':26} {'read':>8} {'floor':>9} {'products':>9}       {'step':>9}"
        console.print(head, highlight=False)
        measured = measure_quantized_decode(shapes.split(","), context, repeats)
        while True:
            with watched_models() as seen:
                if (row := next(measured, None)) is None:
                    break
            rows.append(row)
            models += (msgspec.structs.replace(model, seen_in=(f"shape {row.shape}",)) for model in seen)
            if record is not None:  # after every shape: a run that is cut short leaves what it has measured
                _put(record, shapes, rows, models)
            progress.print(f"{row.shape}: start {row.startup}", soft_wrap=True)
            line = f"{f'{row.shape} @ {row.context}':26} {row.num_bytes / 1e9:5.2f} GB {row.floor_ms:6.3f} ms"
            line += f" {row.products_ms:6.3f} ms {row.products_share:4.0%}"
            line += f"  {row.step_ms:6.3f} ms {row.step_share:4.0%}"
            console.print(line, highlight=False, soft_wrap=True)
        if as_json:
            print_json({"rows": [asdict(row) for row in rows]})


def _put(record: Path, shapes: str, rows: Iterable[QuantizedDecodeRow], models: Iterable[SeenModel]) -> None:
    import torch

    from dayshift.engine.models.seen_on_gpu import (
        QuantizedStep,
        SeenRun,
        commit_of,
        machine_name,
        put_run,
        today,
    )

    run = SeenRun(
        command="dayshift bench gguf" + ("" if shapes == _ALL_SHAPES else f" --shapes {shapes}"),
        machine=machine_name(torch.cuda.get_device_name()),
        commit=commit_of(Path.cwd()),
        date=today(),
        quantized_steps=tuple(
            QuantizedStep(
                shape=row.shape,
                context=row.context,
                num_bytes=row.num_bytes,
                floor_ms=row.floor_ms,
                products_ms=row.products_ms,
                step_ms=row.step_ms,
            )
            for row in rows
        ),
    )
    put_run(record, run.with_models(models))
