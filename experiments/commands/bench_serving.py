"""`dayshift bench ttft | decode | serve | kernels`: the engine's speed, and another server's beside it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dayshift.engine.config import EngineConfig, KVCacheDType
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.planners import default_model_folder
from dayshift.types import DayshiftError

if TYPE_CHECKING:  # torch, which the other commands do not wait for
    from dayshift.engine.bench.serving import Measured, Prompts
    from dayshift.engine.bench.targets import Target

Model = Annotated[
    str,
    typer.Option(
        help="`default`, a folder, a hub's id, or a shape with random weights: llama-3.1-8b, qwen3-30b-a3b."
    ),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(help="Another OpenAI-compatible server to measure in the same run: URL or URL=MODEL."),
]
OnlyPeers = Annotated[
    bool, typer.Option("--only-peers", help="Leave our own engine out: a GPU may not hold both models.")
]
InProcess = Annotated[bool, typer.Option(help="Measure the engine without its HTTP server, too.")]
TensorParallel = Annotated[int, typer.Option(min=1, help="GPUs that our engine spreads the model over.")]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Measure the batch-invariant kernels, beside the others.")
]
QuantizedKV = Annotated[
    KVCacheDType,
    typer.Option("--kv-cache-dtype", help="Measure KV in use as int8 or fp8, beside the model's dtype."),
]
Repeats = Annotated[int, typer.Option(min=1, help="The median of so many.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def ttft(
    model: Model = DEFAULT_MODEL,
    prompts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "133,598,2340,8892,26926",
    peer: Peer = None,
    only_peers: OnlyPeers = False,
    in_process: InProcess = False,
    repeats: Repeats = 3,
    tensor_parallel: TensorParallel = 1,
    deterministic: Deterministic = False,
    as_json: AsJson = False,
) -> None:
    """Time to first token of one fresh prompt at a time, seen by an HTTP client."""
    from dayshift.engine.bench.serving import measure_ttft

    lengths = numbers_of("--prompts", prompts)
    _compare(
        "ttft_ms",
        model,
        peer or [],
        in_process,
        max(lengths) + 16,
        lambda target, prompts: measure_ttft(target, prompts, lengths, repeats),
        as_json,
        tensor_parallel,
        deterministic,
        only_peers,
    )


def decode(
    model: Model = DEFAULT_MODEL,
    cells: Annotated[str, typer.Option(help="BATCH@CONTEXT, with commas between.")] = (
        "1@133,1@8000,8@2048,32@2048,100@2048"
    ),
    temperature: Annotated[
        float, typer.Option(min=0.0, help="1 spreads tokens over the experts of random weights.")
    ] = 0.0,
    peer: Peer = None,
    only_peers: OnlyPeers = False,
    in_process: InProcess = False,
    repeats: Repeats = 3,
    tensor_parallel: TensorParallel = 1,
    deterministic: Deterministic = False,
    kv_cache_dtype: QuantizedKV = "auto",
    as_json: AsJson = False,
) -> None:
    """Milliseconds of a decode step, while all sequences of a batch decode."""
    from dayshift.engine.bench.serving import measure_decode

    pairs = [_cell(cell) for cell in cells.split(",")]
    _compare(
        "decode_ms",
        model,
        peer or [],
        in_process,
        max(batch * (context + 512) for batch, context in pairs),
        lambda target, prompts: measure_decode(target, prompts, pairs, repeats, temperature),
        as_json,
        tensor_parallel,
        deterministic,
        only_peers,
        kv_cache_dtype,
    )


def serve(
    model: Model = DEFAULT_MODEL,
    num_decoders: Annotated[int, typer.Option(min=1, help="Sequences that decode.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that arrives.")] = 8000,
    peer: Peer = None,
    in_process: InProcess = False,
    as_json: AsJson = False,
) -> None:
    """Milliseconds between tokens, alone and while a long prompt arrives."""
    from dayshift.engine.bench.serving import measure_beside, warm_up

    rows: dict[str, dict[str, float]] = {}
    with stdout_kept_for_json() as print_json:
        num_tokens = num_decoders * 1024 + prompt + 512
        for name, target, prompts in _targets(model, peer or [], in_process, num_tokens):
            warm_up(target, prompts)
            measured = measure_beside(target, prompts, num_decoders, prompt)
            rows[name] = asdict(measured) | {"ratio": measured.ratio}
        if as_json:
            print_json(rows)
            return
    table = Table("", "alone p50", "alone p99", "beside p99", "ratio", "TTFT of the prompt", box=None)
    for name, row in rows.items():
        values = [row[key] for key in ("alone_p50_ms", "alone_p99_ms", "beside_p99_ms")]
        table.add_row(
            name,
            *(f"{value:.2f} ms" for value in values),
            f"{row['ratio']:.2f}",
            f"{row['prompt_ttft_ms']:.0f} ms",
        )
    Console().print(table)


def kernels(
    shape: Annotated[
        str, typer.Option(help="llama-3.1-8b, qwen3-30b-a3b, or gguf: products with quantised matrices.")
    ] = "llama-3.1-8b",
    only: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    tune_products: Annotated[
        Path | None,
        typer.Option(
            help="Time cuBLASLt's tiles for long prompts instead, and put the fastest into this file."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Each kernel by itself on a CUDA device, and its share of the ceiling measured in the same run."""
    import torch

    from dayshift.engine.bench.kernels import SHAPES, decoder_cases, measure_kernels
    from dayshift.engine.bench.quantized_kernels import quantized_cases

    if shape not in {*SHAPES, "gguf"}:
        raise DayshiftError(f"--shape {shape}: unknown; allowed: {', '.join(SHAPES)}, gguf")
    if tune_products is not None and shape == "gguf":
        raise DayshiftError(
            f"--tune-products --shape gguf: cuBLAS has no part in it; allowed: {', '.join(SHAPES)}"
        )
    if tune_products is not None and (only or as_json):
        raise DayshiftError("--tune-products goes with --shape alone, not with --only or --json")
    if not torch.cuda.is_available():
        raise DayshiftError("bench kernels: no CUDA device here; kernels are timed on one only")
    if tune_products is not None:
        _tune_products(shape, tune_products)
        return
    with stdout_kept_for_json() as print_json:
        rows = []
        console = Console(stderr=as_json)
        cases = quantized_cases() if shape == "gguf" else decoder_cases(SHAPES[shape])
        for row in measure_kernels(cases, only):
            rows.append(row)
            rate = f"{row.rate:8.2f} {row.unit}"
            console.print(f"{row.name:48} {row.microseconds:10.1f} µs {rate:16} {row.share:6.1%}")
        if as_json:
            print_json(
                {"shape": shape, "device": torch.cuda.get_device_name(), "rows": list(map(asdict, rows))}
            )


def _tune_products(shape: str, file: Path) -> None:
    import torch

    from dayshift.engine.bench.kernels import SHAPES
    from dayshift.engine.bench.products import as_tables, tune, weights_of
    from dayshift.engine.kernels import cublas_lt
    from dayshift.engine.kernels.tuned_linear import read_tables, write_tables

    device, version = torch.cuda.get_device_name(), cublas_lt.version()
    others = read_tables(file, device, version) if file.exists() else {}
    write_tables(file, device, version, others)  # what cannot be written is said before anything is timed
    console, rows = Console(stderr=True), []
    for row in tune(weights_of(SHAPES[shape])):
        rows.append(row)
        write_tables(file, device, version, others | as_tables(rows))
        product = f"{row.num_tokens} tokens, {row.num_rows} x {row.size}"
        times = f"{row.cublas_us:9.1f} -> {row.tuned_us:9.1f} µs {row.tuned_us / row.cublas_us:6.3f}"
        tile = "cuBLAS's own" if row.algorithm is None else row.algorithm.tile
        console.print(f"{product:32} {times}, tile {tile}")


def _compare(
    quantity: str,
    model: str,
    peers: Sequence[str],
    in_process: bool,
    num_tokens: int,
    measure: Callable[[Target, Prompts], Iterator[Measured]],
    as_json: bool,
    tensor_parallel: int,
    deterministic: bool,
    only_peers: bool,
    kv_cache_dtype: KVCacheDType = "auto",
) -> None:
    """Measure every target, one after the other, and print their cells side by side."""
    from dayshift.engine.bench.serving import WARM_UP_TOKENS, warm_up

    num_tokens = max(num_tokens, WARM_UP_TOKENS)
    if only_peers and not peers:
        raise DayshiftError("--only-peers: there are none; --peer URL names one")
    results: dict[str, dict[str, Any]] = {}
    console = Console(stderr=True)
    with stdout_kept_for_json() as print_json:
        targets = _targets(
            model, peers, in_process, num_tokens, tensor_parallel, deterministic, only_peers, kv_cache_dtype
        )
        for name, target, prompts in targets:
            results[name] = {}
            warm_up(target, prompts)
            for measured in measure(target, prompts):
                results[name][measured.cell] = measured.median_ms
                console.print(f"{name}: {quantity} {measured.cell} {measured.median_ms:.2f}")
        if as_json:
            print_json({name: {quantity: cells} for name, cells in results.items()})
            return
    table = Table(quantity, *results, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for cell in next(iter(results.values())):
        table.add_row(cell, *(f"{cells[cell]:.2f}" for cells in results.values()))
    Console().print(table)


def _targets(
    model: str,
    peers: Sequence[str],
    in_process: bool,
    num_tokens: int,
    tensor_parallel: int = 1,
    deterministic: bool = False,
    only_peers: bool = False,
    kv_cache_dtype: KVCacheDType = "auto",
) -> Iterator[tuple[str, Target, Prompts]]:
    """Ours over HTTP, deterministic, with quantised KV, without HTTP; and the peers: all by the same prompts.

    Every server is in processes of its own, so that it does not wait for the client's interpreter.
    """
    from dayshift.engine.bench.serving import Prompts
    from dayshift.engine.bench.targets import EngineTarget, HttpTarget
    from dayshift.engine.engine import Engine
    from dayshift.engine.models.formats import load_model_config
    from dayshift.engine.router.replicas import running_replicas
    from dayshift.engine.server.run import ServerOptions

    seed = time.time_ns()
    with model_config(model, num_tokens) as config:
        config = replace(config, tensor_parallel=tensor_parallel)
        vocab_size = load_model_config(Path(config.model)).vocab_size
        options = ServerOptions(port=0, model_name="bench")
        if not only_peers:
            with running_replicas(config, options, 1) as (url,):
                yield "ours", HttpTarget(url, "bench"), Prompts(vocab_size, seed)
        if deterministic and not only_peers:
            with running_replicas(replace(config, deterministic=True), options, 1) as (url,):
                yield "ours, deterministic", HttpTarget(url, "bench"), Prompts(vocab_size, seed)
        if kv_cache_dtype != "auto" and not only_peers:
            with running_replicas(replace(config, kv_cache_dtype=kv_cache_dtype), options, 1) as (url,):
                yield f"ours, {kv_cache_dtype} KV", HttpTarget(url, "bench"), Prompts(vocab_size, seed)
        if in_process and not only_peers:
            engine = Engine(config)
            yield "ours, in process", EngineTarget(engine), Prompts(vocab_size, seed)
            engine.close()
        for peer in peers:
            url, _, name = peer.partition("=")
            yield url, HttpTarget(url, name or "m"), Prompts(vocab_size, seed)


@contextmanager
def model_config(model: str, num_tokens: int) -> Iterator[EngineConfig]:
    """The engine for a model or a shape, with room for `num_tokens` tokens of KV."""
    from dayshift.engine.bench.dummy_models import SHAPES, write_shape
    from dayshift.engine.models.folder import resolve_model

    config = EngineConfig(model="", num_kv_blocks=num_tokens // 16 + 64)
    if model in SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            yield replace(config, model=str(write_shape(model, Path(folder))), load_format="dummy")
    elif model == DEFAULT_MODEL:
        yield replace(config, model=str(default_model_folder()))
    else:
        yield replace(config, model=str(resolve_model(model)))


def numbers_of(option: str, text: str) -> list[int]:
    """The numbers of an option's text. Raises DayshiftError if they are none, or not positive."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise DayshiftError(f"{option} {text}: positive numbers with commas between are allowed")
    return numbers


def _cell(text: str) -> tuple[int, int]:
    batch, at, context = text.partition("@")
    if not (at and batch.isdecimal() and context.isdecimal() and int(batch) and int(context)):
        raise DayshiftError(f"--cells {text}: BATCH@CONTEXT is allowed, such as 8@2048")
    return int(batch), int(context)
