"""`dayshift bench gguf`: decode steps of quantised models against the bytes that they read."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from dayshift.experiments.console import stdout_kept_for_json


def gguf(
    shapes: Annotated[
        str, typer.Option(help="Models of random weights, with commas between.")
    ] = "llama-3.2-3b-q4_k_m,gpt-oss-20b-mxfp4,qwen3-30b-a3b-q3_k_m,qwen3-32b-q4_k_m",
    context: Annotated[int, typer.Option(min=1, help="Tokens of the sequence that decodes.")] = 133,
    repeats: Annotated[int, typer.Option(min=1, help="The median of so many.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Decode of quantised models on a CUDA device, and its share of the read bandwidth of the same run."""
    from dayshift.engine.bench.quantized_decode import QuantizedDecodeRow, measure_quantized_decode

    rows: list[QuantizedDecodeRow] = []
    console, progress = Console(stderr=as_json), Console(stderr=True)
    with stdout_kept_for_json() as print_json:
        head = f"{'one sequence':26} {'read':>8} {'floor':>9} {'products':>9}       {'step':>9}"
        console.print(head, highlight=False)
        for row in measure_quantized_decode(shapes.split(","), context, repeats):
            rows.append(row)
            progress.print(f"{row.shape}: start {row.startup}", soft_wrap=True)
            line = f"{f'{row.shape} @ {row.context}':26} {row.num_bytes / 1e9:5.2f} GB {row.floor_ms:6.3f} ms"
            line += f" {row.products_ms:6.3f} ms {row.products_share:4.0%}"
            line += f"  {row.step_ms:6.3f} ms {row.step_share:4.0%}"
            console.print(line, highlight=False, soft_wrap=True)
        if as_json:
            print_json({"rows": [asdict(row) for row in rows]})
