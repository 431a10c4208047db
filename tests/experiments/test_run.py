"""Whole runs through the command: MuJoCo, recorder and database are the real ones."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dayshift.dataset_export.run_folder import open_run

from .conftest import Terminal

TWO_STEPS = "planner: {memory: oracle}\nplan: {shifts: [[[turn on the stove, put the bowl on the stove]]]}\n"
SIX_STEPS = ["turn on the stove", "put the bowl on the stove", "put the bowl on the plate"] * 2


@pytest.fixture
def experiment(tmp_path: Path) -> str:
    (tmp_path / "two.yaml").write_text(TWO_STEPS, encoding="utf-8")
    return "two.yaml"


def only_run(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def attempts_of(run_dir: Path) -> list[tuple[str, str]]:
    """(id, outcome) of every attempt; each has all its frames on the disk."""
    with open_run(run_dir) as run:
        num_frames = {each.attempt.attempt_id: len(each.frames()) for each in run.recorded_attempts()}
        attempts = run.attempts()
    assert num_frames == {attempt.attempt_id: attempt.num_control_steps for attempt in attempts}
    return [(attempt.attempt_id, attempt.outcome) for attempt in attempts]


def test_ctrl_c_is_one_line_keeps_what_is_recorded_and_leaves_no_process(terminal, experiment, tmp_path):
    run = terminal("run", experiment)
    run.wait_for("step 1.1.1 attempt 1 done")
    processes = run.descendants()
    assert len(processes) >= 2, "a simulator and the recorder are running"
    run.press_ctrl_c()
    code, out = run.end()
    folder = only_run(tmp_path)
    assert (code, out) == (130, "")
    assert run.lines[-1] == (
        "dayshift: interrupted; what is recorded is kept, go on with: "
        f"dayshift run --resume {folder.relative_to(tmp_path)}"
    )
    assert run.still_alive(processes) == set()
    assert attempts_of(folder) == [("robot-1-1.1.1-w1", "done")]


@pytest.mark.parametrize("end", [Terminal.terminate, Terminal.press_ctrl_c])
def test_a_run_can_be_ended_while_it_starts(terminal, experiment, tmp_path, end):
    run = terminal("run", experiment)
    run.wait_for("starting planner and simulators")
    processes = run.descendants()
    end(run)
    assert run.end() == (130, "")
    start, *notes, last = run.lines
    assert last.startswith("dayshift: interrupted; ")
    assert (start, notes) == ("starting planner and simulators", [])
    assert run.still_alive(processes) == set()
    assert attempts_of(only_run(tmp_path)) == []


def test_a_killed_run_leaves_no_process_and_goes_on_where_it_was(terminal, experiment, tmp_path):
    run = terminal("run", experiment)
    run.wait_for("step 1.1.1 done")
    processes = run.descendants()
    run.kill()
    assert run.still_alive(processes) == set()
    folder = only_run(tmp_path)
    assert attempts_of(folder) == [("robot-1-1.1.1-w1", "done")]

    resumed = terminal("run", "--resume", str(folder), "--json")
    code, out = resumed.end()
    assert code == 0, resumed.lines
    assert not any("1.1.1" in line for line in resumed.lines), "a finished step is not repeated"
    assert attempts_of(folder) == [("robot-1-1.1.1-w1", "done"), ("robot-1-1.1.2-w1", "done")]
    results = json.loads(out)
    assert (results["steps_completed"], results["planner_calls"], results["is_finished"]) == (2, 5, True)
    assert json.loads((folder / "results.json").read_text()) == results

    again = terminal("run", "--resume", str(folder), "--json")
    assert again.end() == (0, out), "a finished run is only read"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(
    terminal, experiment, small_disk, tmp_path
):
    # More steps than end while the disk is filled.
    (tmp_path / "six.yaml").write_text(f"extends: {experiment}\nplan: {{shifts: [{[SIX_STEPS]}]}}\n")
    run = terminal("run", "six.yaml", "--runs-dir", str(small_disk))
    run.wait_for("step 1.1.1 done")
    processes = run.descendants()
    filler = small_disk / "filler"
    fill(filler)
    code, out = run.end()
    assert (code, out) == (1, "")
    assert run.lines[-1].startswith("dayshift: ")
    assert re.search("disk (is )?full", run.lines[-1])
    assert run.still_alive(processes) == set()
    (folder,) = (path for path in small_disk.iterdir() if path.is_dir())
    filler.unlink()
    done = attempts_of(folder)
    assert 1 <= len(done) < 6
    assert done == [(f"robot-1-1.1.{step}-w1", "done") for step in range(1, len(done) + 1)]

    code, out = terminal("run", "--resume", str(folder), "--json").end()
    assert code == 0
    assert json.loads(out)["steps_completed"] == 6


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_that_is_ended_at_any_moment_says_one_line_and_goes_on(terminal, experiment, tmp_path):
    rng = random.Random(0)
    for num_ended in range(40):
        run = terminal("run", experiment, "--runs-dir", f"runs-{num_ended}")
        run.wait_for("starting planner and simulators")
        time.sleep(rng.choice([0.0, rng.uniform(0.0, 3.0)]))
        processes = run.descendants()
        rng.choice([run.terminate, run.press_ctrl_c])()
        assert run.end() == (130, ""), run.lines
        assert run.lines[-1].startswith("dayshift: interrupted; "), run.lines
        assert not re.search("Traceback|ignored", "\n".join(run.lines)), run.lines
        assert run.still_alive(processes) == set()
