"""`dayshift bench policy`: latency of action chunks, alone and beside decoding planners."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dayshift.engine.config import Device, EngineConfig
from dayshift.engine.servable import Sharing
from dayshift.experiments.commands.bench_serving import model_config
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.console import stdout_kept_for_json
from dayshift.experiments.yaml_tree import ConfigError

if TYPE_CHECKING:
    from dayshift.experiments.policy_bench import BenchLoad, BenchRow, BenchTarget


def policy(
    checkpoint: Annotated[
        str, typer.Option(help="A SmolVLA checkpoint; `small` or `450m`: random weights of that shape.")
    ] = "small",
    model: Annotated[
        str, typer.Option(help="The planner's model beside it: `default`, a folder, a hub's id or a shape.")
    ] = DEFAULT_MODEL,
    robots: Annotated[
        str, typer.Option(help="Numbers of robots, with commas, that ask at the same moment, alone.")
    ] = "1,8,32",
    beside: Annotated[
        str, typer.Option(help="ROBOTSxPLANNERS, with commas: robots at 20 Hz beside decoding planners.")
    ] = "8x8",
    sharing: Annotated[
        str, typer.Option(help="How robots and planners share a GPU: slices, streams, or both with a comma.")
    ] = "slices",
    n_action_steps: Annotated[
        int, typer.Option(min=1, help="Actions of a chunk that robots beside planners use.")
    ] = 10,
    context: Annotated[int, typer.Option(min=1, help="Tokens of a planner's prompt.")] = 200,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of each measurement.")] = 10.0,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a GPU.")] = "auto",
    http: Annotated[bool, typer.Option(help="Call the engine through its HTTP server, or directly.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Measure how long robots wait for chunks, and planners for tokens.

    The robots of --robots ask together, again and again, and nothing else runs. Those of --beside ask as
    often as at 20 Hz, spread over the time, while planner sessions decode; the planners are measured alone
    first. With several kinds of --sharing, the policy is loaded for each, and measured in turn.
    """
    from dayshift.experiments.policy_bench import WINDOW, BenchLoad

    alone = _numbers("--robots", robots)
    pairs = _pairs("--beside", beside)
    kinds = _kinds("--sharing", sharing)
    load = partial(BenchLoad, context=context, seconds=seconds)
    loads = [load(policy=kind, num_robots=number) for kind in kinds for number in alone]
    planners = dict.fromkeys(number for _, number in pairs)
    loads += [load(policy=kinds[0], num_robots=0, num_planners=number) for number in planners]
    loads += [
        load(policy=kind, num_robots=r, num_planners=p, n_action_steps=n_action_steps)
        for r, p in pairs
        for kind in kinds
    ]
    most_planners = max((number for _, number in pairs), default=1)
    rows: list[BenchRow] = []
    with stdout_kept_for_json() as print_json, ExitStack() as stack:
        config = stack.enter_context(model_config(model, most_planners * WINDOW))
        target = stack.enter_context(_serving(config, checkpoint, kinds, device, http))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        bar = progress.add_task("policy", total=len(loads))
        for row in _measure(target, loads):
            rows.append(row)
            progress.advance(bar)
        if as_json:
            print_json({"checkpoint": checkpoint, "model": model, "rows": [asdict(row) for row in rows]})
    if not as_json:
        _print(rows)


@contextmanager
def _serving(
    config: EngineConfig, checkpoint: str, kinds: Sequence[Sharing], device: Device, http: bool
) -> Iterator[BenchTarget]:
    """The engine, with the policy under the name of each kind of sharing."""
    from dayshift.policy.serving import smolvla_source
    from dayshift.policy.smolvla.dummy import SHAPES, write_dummy_checkpoint

    with ExitStack() as stack:
        folder = checkpoint
        if checkpoint in SHAPES:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dayshift-bench-"))
            write_dummy_checkpoint(Path(folder), checkpoint)
        sources = tuple(smolvla_source(kind, folder, device=device, sharing=kind) for kind in kinds)
        # Drafted tokens come several at a time: what is wanted here is the time of a step.
        config = replace(config, device=device, speculation="off", policies=sources)
        if http:
            from dayshift.engine.client import DayshiftClient
            from dayshift.engine.server import running_server
            from dayshift.experiments.policy_bench import BenchTarget

            url = stack.enter_context(running_server(config))
            yield BenchTarget.of_clients(partial(DayshiftClient, url))
        else:
            from dayshift.experiments.policy_bench_engine import running_engine

            yield stack.enter_context(running_engine(config))


def _measure(target: BenchTarget, loads: list[BenchLoad]) -> Iterator[BenchRow]:
    """A row for each load; those beside planners with their ratio to the same planners alone."""
    from dayshift.experiments.policy_bench import measure

    planners_alone: dict[int, BenchRow] = {}
    for load in loads:
        row = measure(target, load)
        if load.num_robots == 0:
            planners_alone[load.num_planners] = row
        elif (without := planners_alone.get(load.num_planners)) is not None:
            row = replace(
                row,
                token_p50_ratio=_ratio(row.token_p50_ms, without.token_p50_ms),
                token_p99_ratio=_ratio(row.token_p99_ms, without.token_p99_ms),
            )
        yield row


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _numbers(option: str, text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"{option}: found {text!r}, allowed: positive whole numbers with commas")
    return [int(word) for word in words]


def _kinds(option: str, text: str) -> list[Sharing]:
    words = [word.strip() for word in text.split(",")]
    kinds = [kind for kind in get_args(Sharing) if kind in words]
    if len(kinds) < len(words):
        raise ConfigError(f"{option}: found {text!r}, allowed: {', '.join(get_args(Sharing))}")
    return kinds


def _pairs(option: str, text: str) -> list[tuple[int, int]]:
    pairs = [word.strip().split("x") for word in text.split(",") if word.strip()]
    if not all(len(pair) == 2 and all(part.isdecimal() and int(part) for part in pair) for pair in pairs):
        raise ConfigError(f"{option}: found {text!r}, allowed: ROBOTSxPLANNERS with commas, such as 8x8")
    return [(int(num_robots), int(num_planners)) for num_robots, num_planners in pairs]


def _print(rows: list[BenchRow]) -> None:
    """A table for each kind of sharing, a column for each load: a terminal of 80 columns shows all of it."""
    by_sharing = attrgetter("policy")
    for sharing, loads in groupby(sorted(rows, key=by_sharing), by_sharing):
        table = Table(box=None, show_header=False, title=f"{sharing}: ms until a chunk, and between tokens")
        table.add_column()
        columns = [asdict(row) for row in loads]
        for _ in columns:
            table.add_column(justify="right")
        for label, name, spec in _LINES:
            values = [column[name] for column in columns]
            table.add_row(label, *("" if value is None else format(value, spec) for value in values))
        Console().print(table)


_LINES = (  # label, field of BenchRow, format
    ("robots", "num_robots", "d"),
    ("planners", "num_planners", "d"),
    ("chunks/s", "chunks_per_s", ".1f"),
    ("chunk p50", "chunk_p50_ms", ".1f"),
    ("chunk p95", "chunk_p95_ms", ".1f"),
    ("chunk p99", "chunk_p99_ms", ".1f"),
    ("queued p50", "queued_p50_ms", ".1f"),
    ("computed p50", "infer_p50_ms", ".1f"),
    ("computed p99", "infer_p99_ms", ".1f"),
    ("robots in a batch", "mean_batch_size", ".1f"),
    ("token p50", "token_p50_ms", ".1f"),
    ("token p99", "token_p99_ms", ".1f"),
    ("token p50 / planners alone", "token_p50_ratio", ".2f"),
    ("token p99 / planners alone", "token_p99_ratio", ".2f"),
)
