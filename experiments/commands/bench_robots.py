"""`dayshift bench robots`: many robots in a closed loop; `dayshift bench robots-plot` draws the result."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dayshift.engine.bench.robots import RobotsLoad, RobotsRow
from dayshift.engine.bench.robots_process import measure_robots
from dayshift.engine.config import KVAtRest
from dayshift.experiments.commands.bench_serving import model_config, numbers_of
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.folders import describe_environment
from dayshift.experiments.robots_plot import draw_robots
from dayshift.types import DayshiftError

if TYPE_CHECKING:
    from dayshift.engine.config import EngineConfig

_GIB = 1 << 30
_OURS = "dayshift"


def robots(
    model: Annotated[
        str,
        typer.Option(help="`default`, a folder, a hub's id, or a shape with random weights."),
    ] = "qwen3-30b-a3b",
    robots: Annotated[str, typer.Option(help="Numbers of robots, with commas.")] = "20,50,100,200,400",
    duration: Annotated[
        float, typer.Option(min=1, help="Seconds for each number; the first third is not measured.")
    ] = 60.0,
    think: Annotated[float, typer.Option(min=0.01, help="Seconds between calls, the mean.")] = 5.0,
    window: Annotated[int, typer.Option(min=128, help="Tokens that a session keeps.")] = 8192,
    history: Annotated[int, typer.Option(min=1, help="Tokens of a robot's past, the mean.")] = 10_000,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of a turn.")] = 102,
    generated_tokens: Annotated[int, typer.Option(min=1, help="Of a reply.")] = 40,
    system_tokens: Annotated[int, typer.Option(min=1, help="Of the system prompt.")] = 600,
    kv_at_rest: Annotated[KVAtRest, typer.Option(help="Codec in host memory and on disk.")] = "int8",
    kv_cache_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory for KV in use; default: most of the GPU.")
    ] = None,
    host_kv_gib: Annotated[
        float | None, typer.Option(min=0, help="Host memory for parked KV; default: 8 on CUDA.")
    ] = None,
    store_dir: Annotated[
        Path | None, typer.Option(help="On the disk for parked KV; default: temporary.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Another OpenAI-compatible server, sent the whole history: URL or URL=MODEL."),
    ] = None,
    peers_cut: Annotated[
        bool, typer.Option(help="Robots of a peer cut their history to the window themselves.")
    ] = False,
    only_peers: Annotated[bool, typer.Option("--only-peers", help="Leave our own engine out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure calls per second and waits of many robots that each have a long past with their planner."""
    from dayshift.engine.models.formats import load_model_config
    from dayshift.engine.server.run import ServerOptions, running_server

    numbers = numbers_of("--robots", robots)
    results: dict[str, list[RobotsRow]] = {}
    with stdout_kept_for_json() as print_json, model_config(model, 0) as config, ExitStack() as stack:
        load = RobotsLoad(
            vocab_size=load_model_config(Path(config.model)).vocab_size,
            duration_s=duration,
            think_s=think,
            new_tokens=new_tokens,
            generated_tokens=generated_tokens,
            history_tokens=history,
            system_tokens=system_tokens,
            window=window,
            cuts_history=peers_cut,
        )
        store_dir = store_dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = replace(
            config,
            window=window,
            num_kv_blocks=None,
            kv_cache_bytes=_num_bytes(kv_cache_gib),
            host_kv_bytes=_num_bytes(host_kv_gib),
            kv_at_rest=kv_at_rest,
            store_dir=store_dir,
        )
        if not only_peers:
            with running_server(config, ServerOptions(port=0, model_name=_OURS)) as url:
                results[_OURS] = _measure(_OURS, url, load, numbers, None)
        for address in peer or []:
            url, _, name = address.partition("=")
            results[url] = _measure(url, url, load, numbers, name or "m")
        if as_json:
            print_json(_report(model, load, config, results))
    if not as_json:
        _print(results)


def plot(
    results: Annotated[Path, typer.Argument(help="What `dayshift bench robots --json` printed.")],
    to: Annotated[Path, typer.Option(help="The picture, SVG.")],
) -> None:
    """Draw waits, calls per second and where KV came from, by the number of robots."""
    try:
        servers = json.loads(results.read_text(encoding="utf-8"))["servers"]
        svg = draw_robots(servers)
    except (OSError, ValueError, KeyError) as error:
        raise DayshiftError(f"{results}: not what `dayshift bench robots --json` prints ({error})") from error
    to.write_text(svg, encoding="utf-8")


def _num_bytes(gib: float | None) -> int | None:
    return None if gib is None else round(gib * _GIB)


def _measure(
    name: str, url: str, load: RobotsLoad, numbers: Sequence[int], peer_model: str | None
) -> list[RobotsRow]:
    """The rows of one server; what comes is shown as it comes."""
    rows: list[RobotsRow] = []
    console = Console(stderr=True)
    for item in measure_robots(url, load, numbers, peer_model):
        if isinstance(item, str):
            console.print(f"{name}: {item}")
        else:
            rows.append(item)
            console.print(
                f"{name}: {item.num_robots} robots: {item.calls_per_s:.1f} calls/s, p50 {item.p50_s:.2f} s, "
                f"p95 {item.p95_s:.2f} s"
            )
    return rows


def _report(
    model: str, load: RobotsLoad, config: EngineConfig, results: dict[str, list[RobotsRow]]
) -> dict[str, Any]:
    import torch

    return {
        "model": model,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        **describe_environment(),
        "load": asdict(load),
        "engine": {
            "kv_at_rest": config.kv_at_rest,
            "kv_cache_bytes": config.kv_cache_bytes,
            "host_kv_bytes": config.host_kv_bytes,
        },
        "servers": {name: [asdict(row) for row in rows] for name, rows in results.items()},
    }


def _print(results: dict[str, list[RobotsRow]]) -> None:
    table = Table(
        "server", "robots", "calls/s", "p50", "p95", "first token p50", "token gap p95", "computed", "GPU",
        "host", "disk", "recomputed", "failures", "wrong sessions", box=None,
    )  # fmt: skip
    for column in table.columns[1:]:
        column.justify = "right"
    for name, rows in results.items():
        for row in rows:
            sources = ["–"] * 4 if row.sources is None else [f"{s:.1%}" for s in asdict(row.sources).values()]
            table.add_row(
                name,
                str(row.num_robots),
                f"{row.calls_per_s:.1f}",
                f"{row.p50_s:.2f} s",
                f"{row.p95_s:.2f} s",
                f"{row.first_token_p50_s:.2f} s",
                f"{row.token_gap_p95_s * 1e3:.1f} ms",
                f"{row.computed_tokens:,.0f}",
                *sources,
                str(row.num_failures),
                str(row.num_wrong_sessions),
            )
    Console().print(table)
