"""`dayshift bench restore | endless`: what a parked session costs when it is called, and a long session."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dayshift.engine.config import Device, DType, EngineConfig
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.folders import describe_environment
from dayshift.experiments.planners import default_model_folder
from dayshift.types import DayshiftError

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


def endless(
    text: Annotated[Path, typer.Argument(help="A text file, UTF-8.")],
    model: Annotated[str, typer.Option(help="`default`, a folder, a .gguf file, or a hub's id.")] = (
        DEFAULT_MODEL
    ),
    window: Annotated[int, typer.Option(min=128, help="Tokens that the session keeps.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="Of the text that are read.")] = 200_000,
    turn: Annotated[int, typer.Option(min=2, help="Tokens of a turn.")] = 128,
    row: Annotated[int, typer.Option(min=1, help="Tokens of a line of the table.")] = 10_000,
    sample_every: Annotated[
        int, typer.Option(min=1, help="Every so many turns, the window is also computed afresh.")
    ] = 8,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a GPU.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Read a long text through a session with a small window, and compare with computing it afresh.

    Of each line: perplexity; that of sampled turns, in the session and computed afresh; the largest position
    and the most prompt tokens of a turn; a turn's median time, the slowest, the slowest that compacts.
    """
    from dayshift.engine import Engine
    from dayshift.engine.bench.endless import overall_ratio, read_endless

    folder = str(default_model_folder()) if model == DEFAULT_MODEL else model
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DayshiftError(f"{text}: cannot be read as UTF-8 text ({error})") from error
    with stdout_kept_for_json() as print_json, tempfile.TemporaryDirectory() as store_dir:
        config = EngineConfig(
            model=folder,
            device=device,
            dtype=dtype,
            window=window,
            num_kv_blocks=2 * window // 16 + 16,
            restore="read",
            store_dir=Path(store_dir),
        )
        engine = Engine(config)
        token_ids = list(islice(engine.tokenizer.encode(words), tokens))
        if len(token_ids) < turn:
            raise DayshiftError(f"{text}: has {len(token_ids)} tokens, less than a turn of {turn}")
        rows = []
        progress = Console(stderr=True)
        for measured in read_endless(
            engine, token_ids, window=window, turn_tokens=turn, row_tokens=row, sample_every=sample_every
        ):
            rows.append(measured)
            progress.print(
                f"{measured.first_token:,}: perplexity {measured.perplexity:.2f}, ratio {measured.ratio:.4f}"
            )
        engine.close()
        if as_json:
            print_json(
                {
                    "model": Path(folder).name,
                    "text": text.name,
                    "window": window,
                    "turn": turn,
                    "device": engine.pool.device.type,
                    **describe_environment(),
                    "ratio": overall_ratio(rows),
                    "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
                }
            )
            return
    table = Table(
        "from", "perplexity", "sampled", "afresh", "ratio", "position", "computed", "ms", "slowest",
        "compacting", box=None,
    )  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    for measured in rows:
        table.add_row(
            f"{measured.first_token:,}",
            f"{measured.perplexity:.2f}",
            f"{measured.sampled_perplexity:.2f}",
            f"{measured.fresh_perplexity:.2f}",
            f"{measured.ratio:.4f}",
            str(measured.max_position),
            str(measured.max_computed),
            f"{measured.median_turn_ms:.0f}",
            f"{measured.slowest_turn_ms:.0f}",
            f"{measured.slowest_compaction_ms:.0f}",
        )
    Console().print(table, f"ratio of the perplexities over all sampled turns: {overall_ratio(rows):.4f}")
