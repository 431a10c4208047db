"""The record of which models have run on which GPU, from which docs/models.md is made. No torch here.

It is written on the machine with the GPU, by what ran there: `make gpu` notes the models of the tests that
passed, `dayshift bench gguf --record FILE` those that it measured.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dayshift.types import DayshiftError

OUR_DECODER, FALLBACK = "our decoder", "`transformers` fallback"


class SeenModel(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A model that has computed on a GPU.

    weights: the dtype, or of quantised weights their types, by name · seen_in: names of tests, or the shape
    that a benchmark gave it.
    """

    model_type: str
    weights: str
    path: str = OUR_DECODER
    seen_in: tuple[str, ...] = ()

    def joined(self, other: SeenModel) -> SeenModel:
        """The same model, seen in two places."""
        return msgspec.structs.replace(self, seen_in=tuple(sorted({*self.seen_in, *other.seen_in})))


class QuantizedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `dayshift bench gguf`."""

    shape: str
    context: int
    num_bytes: int
    floor_ms: float
    products_ms: float
    step_ms: float


class SeenRun(msgspec.Struct, frozen=True, kw_only=True):
    """One command on one machine. `date`: ISO 8601 · `note`: what a reader must know of it."""

    command: str
    machine: str
    commit: str
    date: str
    note: str = ""
    num_passed: int | None = None  # tests
    failed: tuple[str, ...] = ()
    models: tuple[SeenModel, ...] = ()
    quantized_steps: tuple[QuantizedStep, ...] = ()

    def with_models(self, models: Iterable[SeenModel]) -> SeenRun:
        """The run with more models; those that it has already are joined with theirs."""
        found: dict[tuple[str, str, str], SeenModel] = {}
        for model in (*self.models, *models):
            key = model.model_type, model.weights, model.path
            found[key] = model.joined(found.get(key, model))
        return msgspec.structs.replace(self, models=tuple(sorted(found.values())))


def read_runs(path: Path) -> tuple[SeenRun, ...]:
    """The runs of a record, the oldest first. Raises DayshiftError for a file that is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[SeenRun, ...]])["runs"]
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise DayshiftError(f"{path} is no record of GPU runs: {error}") from error


def put_run(path: Path, run: SeenRun) -> None:
    """Add a run to a record, in place of an earlier one of the same command on the same kind of machine."""
    runs = read_runs(path) if path.exists() else ()
    kept = [old for old in runs if (old.command, old.machine) != (run.command, run.machine)]
    content = msgspec.json.format(msgspec.json.encode({"runs": (*kept, run)}), indent=1)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(content + b"\n")
    unfinished.replace(path)


def today() -> str:
    """The date, as records carry it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def commit_of(folder: Path) -> str:
    """The commit that is checked out, `+` behind it where files differ. Without Git, what the variable
    DAYSHIFT_COMMIT says. Raises DayshiftError if neither does."""
    if named := os.environ.get("DAYSHIFT_COMMIT"):
        return named
    describe = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(describe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise DayshiftError(
            f"which commit runs cannot be found out, {folder} is no Git checkout; set DAYSHIFT_COMMIT"
        ) from error


def machine_name(gpu: str) -> str:
    """A GPU's name without its maker: `NVIDIA H200` is an H200."""
    return re.sub(r"^NVIDIA ", "", gpu)


def seen_models(runs: Iterable[SeenRun]) -> Iterator[tuple[SeenModel, SeenRun]]:
    """Every model of every machine, with all places where it was seen, and the newest run that saw it."""
    found: dict[tuple[str, str, str, str], tuple[SeenModel, SeenRun]] = {}
    for run in runs:
        for model in run.models:
            key = (run.machine, model.model_type, model.weights, model.path)
            earlier = found[key][0] if key in found else model
            found[key] = model.joined(earlier), run
    yield from found.values()
