"""Kills at random moments of recording and export: what was committed is whole, the rest is cleared away.

`make fuzz` runs the long ones and shows their progress.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_script(name: str, folder: Path, num_kills: int, seed: int) -> None:
    """Run a script of this folder in a process with one thread, which may fork.

    By `-c`, so that the writer processes it spawns do not import it again. Its progress goes to stdout.
    """
    command = (
        f"from pathlib import Path; import {name}; {name}.main(Path({str(folder)!r}), {num_kills}, {seed})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", command],
        cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_kill_loses_at_most_the_attempt_in_flight(tmp_path: Path) -> None:
    run_script("record_until_killed", tmp_path, 6, seed=0)


def test_a_kill_in_an_export_leaves_the_old_dataset_or_the_new_one(tmp_path: Path) -> None:
    run_script("export_until_killed", tmp_path, 30, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_lose_at_most_the_attempt_in_flight(tmp_path: Path) -> None:
    run_script("record_until_killed", tmp_path, 300, seed=1000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_in_an_export_leave_the_old_dataset_or_the_new_one(tmp_path: Path) -> None:
    run_script("export_until_killed", tmp_path, 500, seed=2000)
