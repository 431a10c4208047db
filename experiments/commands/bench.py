"""`dayshift bench`: measurements of the engine on this machine."""

from __future__ import annotations

from dataclasses import asdict, replace
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dayshift.engine.api import Message
from dayshift.engine.config import Device, DType, EngineConfig, KVCacheDType
from dayshift.experiments.commands import (
    bench_gguf,
    bench_policy,
    bench_robots,
    bench_serving,
    bench_sessions,
    bench_speculation,
    bench_startup,
)
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.planners import default_model_folder
from dayshift.planner.protocol import SYSTEM_PROMPTS, Dialect

if TYPE_CHECKING:  # torch, which the other commands do not wait for
    from dayshift.engine.bench.kv import CodecRow, Transcript

app = typer.Typer(help="Measure the engine on this machine.", no_args_is_help=True)
app.command("ttft")(bench_serving.ttft)
app.command("decode")(bench_serving.decode)
app.command("serve")(bench_serving.serve)
app.command("kernels")(bench_serving.kernels)
app.command("gguf")(bench_gguf.gguf)
app.command("policy")(bench_policy.policy)
app.command("restore")(bench_sessions.restore)
app.command("endless")(bench_sessions.endless)
app.command("speculation")(bench_speculation.speculation)
app.command("startup")(bench_startup.startup)
app.command("robots")(bench_robots.robots)
app.command("robots-plot")(bench_robots.plot)

_SEED = 20_000_000_007  # the transcript's; far from every seed of the planner's training


@app.command("kv")
def kv(
    model: Annotated[str, typer.Option(help="`default`, a folder, a .gguf file, or a hub's id.")] = (
        DEFAULT_MODEL
    ),
    num_tokens: Annotated[int, typer.Option(min=16, help="Tokens that are read after the restore.")] = 128,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a GPU.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compare codecs of KV at rest and in use: size, loss and speed, on one operation's transcript."""
    from dayshift.engine import Engine
    from dayshift.engine.bench.kv import compare_codecs, compare_pool
    from dayshift.engine.sessions.record_format import KV_CODECS

    is_default = model == DEFAULT_MODEL
    folder = str(default_model_folder()) if is_default else model
    rows: list[CodecRow] = []
    with stdout_kept_for_json() as print_json:
        config = EngineConfig(model=folder, device=device, dtype=dtype, num_kv_blocks=512)
        engine = Engine(config)
        in_use: tuple[KVCacheDType, ...] = ("int8", "fp8")
        transcript = _operation("compact" if is_default else "general", num_tokens)
        with Progress(console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("codecs", total=len(KV_CODECS) + len(in_use))
            for row in compare_codecs(engine, transcript):
                rows.append(row)
                progress.advance(bar)
            for kv_cache_dtype in in_use:
                quantized = Engine(replace(config, kv_cache_dtype=kv_cache_dtype))
                rows.append(compare_pool(engine, quantized, transcript))
                quantized.close()
                progress.advance(bar)
        engine.close()
        if as_json:
            print_json({"model": model, "rows": [asdict(row) for row in rows]})
    if not as_json:
        _print(rows)


def _operation(dialect: Dialect, num_tokens: int) -> Transcript:
    """A fixed operation; its reviews are read after the restore."""
    from dayshift.engine.bench.kv import Transcript
    from dayshift.planner.training.operations import OperationShape, TurnKind, make_operation

    operation = make_operation(Random(_SEED), OperationShape(num_shifts=3, num_jobs=2, num_steps=3))
    first_review = next(i for i, turn in enumerate(operation.turns) if turn.kind is TurnKind.REVIEW)
    turns = [(Message("user", turn.user), Message("assistant", turn.reply)) for turn in operation.turns]
    return Transcript(
        system=SYSTEM_PROMPTS[dialect],
        past=turns[:first_review],
        future=turns[first_review:],
        num_tokens=num_tokens,
    )


def _print(rows: list[CodecRow]) -> None:
    table = Table(
        "codec", "bytes/token", "ratio", "KL", "KL p95", "same top", "encode GB/s", "decode GB/s", box=None
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row.codec,
            f"{row.bytes_per_token:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.mean_kl:.5f}",
            f"{row.p95_kl:.5f}",
            f"{row.same_top_token:.1%}",
            f"{row.encode_gb_per_s:.2f}",
            f"{row.decode_gb_per_s:.2f}",
        )
    Console().print(table)
