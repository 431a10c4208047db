"""`dayshift models`: which models are here, and what one of them is and takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dayshift.engine.models.folder import pull_model, resolve_model
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.planners import default_model_folder
from dayshift.types import DayshiftError

if TYPE_CHECKING:  # half a second that the other commands do not wait for
    from dayshift.engine.models.inspect import ModelReport

_GIB = 2**30
_ITEMSIZES = {"bfloat16": 2, "float32": 4}  # the engine's dtypes on a GPU and on a CPU

app = typer.Typer(help="Which models are here, and what they take.", no_args_is_help=True)


@app.command("ls")
def list_models(
    folder: Annotated[
        Path | None, typer.Argument(help="Look for models in this folder too.", exists=True, file_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """List the default planner, models in the hub's cache, and those in a folder."""
    found = [(name, _report_or_reason(path)) for name, path in _models(folder)]
    if as_json:
        with stdout_kept_for_json() as print_json:
            print_json({"models": [{"model": name, **_summary(report)} for name, report in found]})
        return
    table = Table("architecture", "parameters", "weights", "on disk", "model", box=None)
    table.columns[-1].overflow = "fold"
    for name, report in found:
        if isinstance(report, str):
            table.add_row("[red]cannot be loaded[/]", "", "", "", f"{name} ({report})")
        else:
            table.add_row(
                report.config.model_type + ("" if report.fallback_reason is None else " (fallback)"),
                _count(report.num_parameters),
                next(iter(report.weight_types)),
                f"{report.file_bytes / _GIB:.2f} GiB",
                name,
            )
    Console().print(table)


@app.command("pull")
def pull(
    repository: Annotated[str, typer.Argument(help="A hub's id, such as Qwen/Qwen3-4B.")],
    file: Annotated[
        str | None, typer.Option(help="One GGUF file of a repository that holds several.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit; main if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Fetch a model into the hub's cache, and say what it is. HF_ENDPOINT names another hub."""
    from dayshift.engine.models.inspect import inspect_model

    report = inspect_model(pull_model(repository, file=file, revision=revision))
    if as_json:
        with stdout_kept_for_json() as print_json:
            print_json({"path": str(report.path), **_summary(report)})
    else:
        Console().print(
            f"{report.config.model_type}, {_count(report.num_parameters)} parameters: {report.path}",
            soft_wrap=True,
            highlight=False,
        )


@app.command("convert")
def convert(
    model: Annotated[str, typer.Argument(help="`default`, a folder, a .gguf file, or a hub's id.")],
    out: Annotated[Path, typer.Argument(help="The .gguf file or the folder to be written.")],
    weight_type: Annotated[
        str, typer.Option("--type", help="F32, F16, BF16; for .gguf also Q8_0 Q5_0 Q5_1 Q4_0 Q4_1 MXFP4.")
    ] = "BF16",
) -> None:
    """Write a model in another format, or with weights of another type."""
    from dayshift.engine.models.convert import convert_model
    from dayshift.engine.models.inspect import inspect_model

    convert_model(_resolved(model), out, weight_type)
    report = inspect_model(out)
    Console().print(f"{out}: {report.file_bytes / _GIB:.2f} GiB", soft_wrap=True, highlight=False)


@app.command("inspect")
def inspect(
    model: Annotated[str, typer.Argument(help="`default`, a folder, a .gguf file, or a hub's id.")],
    window: Annotated[int, typer.Option(min=128, help="Tokens of a session's window.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Say what a model is, on which path it would run, and how much memory it takes."""
    from dayshift.engine.models.inspect import inspect_model

    report = inspect_model(_resolved(model))
    if as_json:
        with stdout_kept_for_json() as print_json:
            print_json(_details(report, window))
    else:
        _print_details(report, window)


def _resolved(model: str) -> Path:
    return default_model_folder() if model == DEFAULT_MODEL else resolve_model(model)


def _models(folder: Path | None) -> Iterator[tuple[str, Path]]:
    """Names as `--model` takes them, and where they lie."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    yield DEFAULT_MODEL, default_model_folder()
    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        repositories = frozenset()
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        newest = max(repository.revisions, key=lambda revision: revision.last_modified, default=None)
        if repository.repo_type == "model" and newest is not None:
            yield repository.repo_id, newest.snapshot_path
    if folder is not None:
        configs = (path.parent for path in folder.rglob("config.json"))
        for path in sorted({*configs, *folder.rglob("*.gguf")}):
            yield str(path), path


def _report_or_reason(path: Path) -> ModelReport | str:
    from dayshift.engine.models.inspect import inspect_model

    try:
        return inspect_model(path)
    except DayshiftError as error:
        return str(error)


def _summary(report: ModelReport | str) -> dict[str, Any]:
    if isinstance(report, str):
        return {"can_load": False, "reason": report}
    return {
        "can_load": True,
        "is_fallback": report.fallback_reason is not None,
        "model_type": report.config.model_type,
        "num_parameters": report.num_parameters,
        "weight_types": dict(report.weight_types),
        "file_bytes": report.file_bytes,
    }


def _details(report: ModelReport, window: int) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "format": report.format,
        "config": asdict(report.config),
        "file_bytes": report.file_bytes,
        "num_parameters": report.num_parameters,
        "num_active_parameters": report.num_active_parameters,
        "weight_types": dict(report.weight_types),
        "session_refusal": report.session_refusal,
        "fallback_reason": report.fallback_reason,
        "runs_as": _runs_as(report),
        "window": window,
        "memory": {
            dtype: {
                "weights_bytes": _weights_bytes(report, dtype),
                "kv_bytes_per_token": report.config.kv_bytes_per_token(itemsize),
                "kv_bytes_per_window": report.config.kv_bytes_per_token(itemsize) * window,
            }
            for dtype, itemsize in _ITEMSIZES.items()
        },
    }


def _print_details(report: ModelReport, window: int) -> None:
    config, details = report.config, _details(report, window)
    table = Table("", "", box=None, show_header=False)
    heads = f"{config.num_heads} heads on {config.num_kv_heads} of keys and values, {config.head_dim} wide"
    table.add_row("model", str(report.path))
    table.add_row("architecture", f"{config.model_type}: {config.num_layers} layers, {heads}")
    if config.moe is not None:
        table.add_row(
            "experts", f"{config.moe.num_experts}, of which a token takes {config.moe.num_experts_per_token}"
        )
    active = f", {_count(report.num_active_parameters)} active" if config.moe is not None else ""
    table.add_row("parameters", _count(report.num_parameters) + active)
    shares = (f"{name} {size / report.num_parameters:.1%}" for name, size in report.weight_types.items())
    table.add_row("weights", f"{report.format}, {report.file_bytes / _GIB:.2f} GiB: {', '.join(shares)}")
    table.add_row("runs as", details["runs_as"])
    table.add_row("context", f"{config.max_positions} tokens at most")
    table.add_row("sessions", "yes" if report.session_refusal is None else f"no: {report.session_refusal}")
    for dtype, memory in details["memory"].items():
        weights, per_window = memory["weights_bytes"] / _GIB, memory["kv_bytes_per_window"] / _GIB
        per_token = memory["kv_bytes_per_token"] / 1024
        table.add_row(
            f"memory, {dtype}",
            f"weights {weights:.2f} GiB; KV {per_token:.1f} KiB a token, {per_window:.2f} GiB "
            f"a window of {window}",
        )
    Console().print(table)


def _weights_bytes(report: ModelReport, dtype: str) -> int:
    """Memory of the weights on a GPU (bfloat16) or a CPU (float32)."""
    if dtype == "bfloat16" and report.fallback_reason is None and _is_quantized(report):
        from dayshift.engine.models.loader import gpu_weight_bytes

        return gpu_weight_bytes(report.path, _ITEMSIZES[dtype])
    return report.loaded_bytes(_ITEMSIZES[dtype])


def _is_quantized(report: ModelReport) -> bool:
    return not set(report.weight_types) <= {"F32", "F16", "BF16"}


def _runs_as(report: ModelReport) -> str:
    if report.fallback_reason is not None:
        return "transformers fallback: slower than our decoder, one sequence at a time"
    path = "own decoder: Triton kernels on a GPU (bfloat16), torch on a CPU (float32)"
    if _is_quantized(report):
        path += "; a GPU keeps quantised weights and unpacks them as it multiplies, a CPU as it loads them"
    return path


def _count(num_parameters: int) -> str:
    return f"{num_parameters / 1e9:.2f} B" if num_parameters >= 1e9 else f"{num_parameters / 1e6:.1f} M"
