"""Record, export, verify, edit with lerobot, verify again, and lerobot's writer beside ours.

python -m dayshift.experiments.export_demo [FOLDER]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dayshift.dataset_export.fresh_process import run_lerobot

EDITED = ("deleted", "split/early", "split/late", "merged")


def main() -> int:
    """Run the demonstration in a new folder; exit code 1 when a dataset is not whole."""
    parent = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    folder = parent / f"export-demo-{time.strftime('%Y%m%d-%H%M%S')}"
    console = Console(highlight=False)

    console.print("[bold]record[/] a small operation in MuJoCo")
    run_dir = dayshift("run", "export_demo", "--runs-dir", str(folder))["run_dir"]
    console.print("[bold]export[/]: pictures that are missing are rendered")
    exported = dayshift("export", run_dir, "--to", str(folder / "dataset"))
    console.print(f"  {exported['num_added']} episodes, {exported['num_frames']} frames")
    console.print("[bold]edit[/] with lerobot: delete, split, merge")
    run_lerobot(
        ["-m", "dayshift.dataset_export.edit_with_lerobot", str(folder / "dataset"), str(folder / "edited")]
    )

    datasets = [folder / "dataset", *(folder / "edited" / name for name in EDITED)]
    verified = dayshift("verify", *map(str, datasets))
    print_verified(console, folder, verified)
    console.print("[bold]speed[/] beside lerobot's own writer, same attempts, same machine")
    measured = run_lerobot(
        ["-m", "dayshift.dataset_export.writer_speed", str(folder / "dataset"), str(run_dir)]
    )
    print_speed(console, json.loads(measured.stdout.splitlines()[-1]))
    return 0 if verified["ok"] else 1


def dayshift(*arguments: str) -> dict[str, Any]:
    """Run a command of ours; its JSON. Its progress and mistakes go to stderr."""
    command = [sys.executable, "-m", "dayshift", *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit(done.returncode)
    return json.loads(done.stdout)


def print_verified(console: Console, folder: Path, verified: dict[str, Any]) -> None:
    """One line per dataset."""
    table = Table("dataset", "episodes", "frames", "pictures", "hashes", "items from lerobot", "state")
    for report in verified["datasets"]:
        name = str(Path(report["dataset"]).relative_to(folder))
        state = "whole" if report["ok"] else "; ".join(report["problems"])
        counts = ("episodes", "frames", "pictures", "hashes_compared", "items_from_lerobot")
        table.add_row(name, *(str(report[count]) for count in counts), state)
    console.print(table)


def print_speed(console: Console, measured: dict[str, Any]) -> None:
    """Frame pairs per second, writer by writer."""
    rates = measured["frame_pairs_per_s"]
    table = Table("writer", "frame pairs/s", "ours is faster by")
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.1f}", f"{rates['ours'] / rate:.0f} x")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
