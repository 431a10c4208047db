"""Record, export, verify, edit with lerobot, verify again, and lerobot's writer beside ours.

python -m dayshift.experiments.export_demo [FOLDER]
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dayshift.dataset_export.fresh_process import measure_writers, run_lerobot
from dayshift.experiments.commands.bench_recording import print_writers

EDITED = ("deleted", "split/early", "split/late", "merged")
IMAGE_SIZES = (128, 256)
MAX_FRAMES = 450  # for the writers that are timed


def main() -> int:
    """Run the demonstration in a new folder; exit code 1 when a dataset is not whole."""
    parent = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    folder = parent / f"export-demo-{time.strftime('%Y%m%d-%H%M%S')}"
    stages = Stages(Console(highlight=False))

    with stages.stage("record", "a small operation in MuJoCo; missing pictures are rendered beside it"):
        run_dir = Path(dayshift("run", "export_demo", "--runs-dir", str(folder))["run_dir"])
    with stages.stage("export", "with what is still missing rendered"):
        exported = dayshift("export", str(run_dir), "--to", str(folder / "dataset"))
        print_exported(stages.console, exported)
    with stages.stage("edit", "with lerobot: delete, split, merge"):
        edit = ["-m", "dayshift.dataset_export.edit_with_lerobot"]
        run_lerobot([*edit, str(folder / "dataset"), str(folder / "edited")])
    with stages.stage("verify", "all of them, in a fresh process, with lerobot's two datasets"):
        datasets = [folder / "dataset", *(folder / "edited" / name for name in EDITED)]
        verified = dayshift("verify", *map(str, datasets))
        print_verified(stages.console, folder, verified)
    with stages.stage("doctor", "lerobot-doctor on the dataset"):
        is_clean = consult_doctor(stages.console, folder, run_dir)
    with stages.stage("speed", "beside lerobot's own writer: same attempts, same machine"):
        print_writers(stages.console, measure_writers(run_dir, IMAGE_SIZES, MAX_FRAMES))
    stages.print_table()
    return 0 if verified["ok"] and is_clean else 1


class Stages:
    """Says what goes on, and at the end how long each stage took."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """Time a stage."""
        self.console.print(f"[bold]{name}[/]: {what}")
        started = time.monotonic()
        yield
        self._seconds[name] = time.monotonic() - started

    def print_table(self) -> None:
        """Seconds by stage."""
        table = Table("stage", "s")
        for name, seconds in [*self._seconds.items(), ("all", sum(self._seconds.values()))]:
            table.add_row(name, f"{seconds:.1f}")
        self.console.print(table)


def dayshift(*arguments: str) -> dict[str, Any]:
    """Run a command of ours; its JSON. Its progress and mistakes go to stderr."""
    command = [sys.executable, "-m", "dayshift", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def print_exported(console: Console, exported: dict[str, Any]) -> None:
    """What became of the attempts."""
    console.print(
        f"  {exported['num_added']} episodes, {exported['num_frames']} frames; "
        f"{exported['num_rendered']} were left to render"
    )


def print_verified(console: Console, folder: Path, verified: dict[str, Any]) -> None:
    """One line per dataset."""
    table = Table("dataset", "episodes", "frames", "pictures", "hashes", "items from lerobot", "state")
    for report in verified["datasets"]:
        name = str(Path(report["dataset"]).relative_to(folder))
        state = "whole" if report["ok"] else "; ".join(report["problems"])
        counts = ("episodes", "frames", "pictures", "hashes_compared", "items_from_lerobot")
        table.add_row(name, *(str(report[count]) for count in counts), state)
    console.print(table)


def consult_doctor(console: Console, folder: Path, run_dir: Path) -> bool:
    """True when lerobot-doctor finds no failure in the dataset without LeRobot's language columns.

    It has no notion of these columns: it wants as many messages on every frame.
    """
    if importlib.util.find_spec("lerobot_doctor") is None:
        console.print("  lerobot-doctor is not installed: it comes with `make test`")
        return True
    silent = folder / "without-language"
    dayshift("export", str(run_dir), "--to", str(silent), "--no-language")
    failures = {dataset: doctor_failures(dataset) for dataset in (folder / "dataset", silent)}
    for dataset, found in failures.items():
        console.print(
            f"  {dataset.name}: {len(found)} failures{''.join(f'; such as {one}' for one in found[:1])}"
        )
    return not failures[silent]


def doctor_failures(dataset: Path) -> list[str]:
    """What lerobot-doctor calls FAIL, check by check."""
    command = [sys.executable, "-m", "lerobot_doctor.cli", str(dataset), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    report = json.loads(done.stdout)
    return [
        f"{result['name']}: {message['message']}"
        for result in report["checks"]
        for message in result["messages"]
        if message["severity"] == "FAIL"
    ]


if __name__ == "__main__":
    sys.exit(main())
