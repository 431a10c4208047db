"""`dayshift bench restore`: what a parked session costs when it is called."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dayshift.engine.config import Device, DType, EngineConfig
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.planners import default_model_folder

_SIZES = (128, 512, 2048)


def restore(
    model: Annotated[str, typer.Option(help="`default`, a folder, a .gguf file, or a hub's id.")] = (
        DEFAULT_MODEL
    ),
    store_dir: Annotated[
        Path | None, typer.Option(help="On the disk in question; default: temporary.")
    ] = None,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a GPU.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compare reading a parked session's KV with computing it again, and with what the engine chooses."""
    from dayshift.engine import Engine
    from dayshift.engine.bench.restore import compare_restores

    folder = str(default_model_folder()) if model == DEFAULT_MODEL else model
    with stdout_kept_for_json() as print_json, tempfile.TemporaryDirectory() as temporary:
        config = EngineConfig(
            model=folder,
            device=device,
            dtype=dtype,
            num_kv_blocks=512,
            store_dir=store_dir or Path(temporary),
        )
        engine = Engine(config)
        sizes = tuple(size for size in _SIZES if size < engine.max_context // 2)
        rows = list(compare_restores(engine, sizes))
        engine.close()
        if as_json:
            print_json({"model": model, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})
            return
    table = Table("tokens", "from", "read ms", "compute ms", "chosen ms", "choice", "to the better", box=None)
    for row in rows:
        table.add_row(
            f"{row.num_tokens:,}",
            row.tier,
            f"{row.read_ms:.1f}",
            f"{row.compute_ms:.1f}",
            f"{row.chosen_ms:.1f}",
            row.choice,
            f"{row.ratio:.2f}",
        )
    Console().print(table)
