"""SIGKILL at random moments of recording: what was committed is whole, the rest is cleared away."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dayshift.dataset_export.repair import repair_run
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.store import RunStore, database_url

SCRIPT = Path(__file__).with_name("record_until_killed.py")


def record_and_kill(run_dir: Path, seed: int, *, whole_group: bool) -> list[str]:
    """Kill the script (or only its parent process) at a random moment; return what it had committed."""
    rng = random.Random(seed)
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), str(run_dir), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        num_commits = rng.choice([0, 1, 1, 2, 3])
        lines = []
        while sum(line.startswith("committed ") for line in lines) < num_commits or not lines:
            lines.append(process.stdout.readline())
        time.sleep(rng.uniform(0.0, 0.4 if num_commits else 2.5))
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        lines += process.stdout.readlines()
    return [line.split()[1] for line in lines if line.startswith("committed ") and line.endswith("\n")]


def check_run(run_dir: Path, told: list[str]) -> None:
    with open_run(run_dir) as run:
        attempts = run.recorded_attempts()
        ids = [attempt.attempt.attempt_id for attempt in attempts]
        # Everything that was told to be committed is there; at most one commit was not told any more.
        assert set(told) <= set(ids)
        for attempt in attempts:
            frames = attempt.frames()
            assert len(frames) == attempt.attempt.num_control_steps == attempt.recording.num_frames
            assert attempt.start().spec.init_state_id == attempt.recording.init_state_id
            for camera in attempt.cameras:
                with attempt.video(camera) as video:
                    assert video.frame_indices == list(range(0, len(frames), 3))
    assert sorted(path.name for path in run_dir.glob("attempts/*")) == sorted(ids)


def kill_and_resume(run_dir: Path, seeds: range) -> None:
    run_dir.mkdir()
    told: list[str] = []
    for seed in seeds:
        told += record_and_kill(run_dir, seed, whole_group=seed % 2 == 0)
        with RunStore(database_url(run_dir), run_dir.name) as store:
            repair = repair_run(run_dir, store)
            assert repair.missing == ()
            assert len(repair.removed) <= 1
            assert str(repair_run(run_dir, store)) == "nothing to repair"
        check_run(run_dir, told)
    assert told


def test_a_kill_loses_at_most_the_attempt_in_flight(tmp_path: Path) -> None:
    kill_and_resume(tmp_path / "run-1", range(4))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_lose_at_most_the_attempt_in_flight(tmp_path: Path) -> None:
    kill_and_resume(tmp_path / "run-1", range(1000, 1300))


def export_and_kill(folder: Path, num_kills: int, seed: int) -> str:
    script = SCRIPT.with_name("export_until_killed.py")
    arguments = [sys.executable, "-W", "ignore", str(script), str(folder), str(num_kills), str(seed)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kill_in_an_export_leaves_the_old_dataset_or_the_new_one(tmp_path: Path) -> None:
    assert "new" in export_and_kill(tmp_path, 25, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_kills_in_an_export_leave_the_old_dataset_or_the_new_one(tmp_path: Path) -> None:
    assert "new" in export_and_kill(tmp_path, 500, seed=2)
