"""dayshift export, verify and repair, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from recording_samples import STORY, make_run

from dayshift.experiments.cli import run as run_command
from dayshift.experiments.folders import create_run_folders
from dayshift.experiments.loading import load_arms


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as `dayshift run` makes it, with a small recording."""
    folder, _ = create_run_folders(tmp_path_factory.mktemp("runs"), load_arms(Path("export_demo")))
    return make_run(folder)


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def dayshift(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """The command, in this process: imports take longer than the tests."""

    def run(*arguments: object) -> Done:
        code = run_command([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Done(code, out, err)

    return run


def test_a_run_becomes_a_dataset_that_is_verified_damaged_and_repaired(
    run_dir: Path, tmp_path: Path, dayshift: Callable[..., Done]
) -> None:
    dataset = tmp_path / "dataset"
    exported = dayshift("export", run_dir, "--to", dataset, "--only", "done", "--json")
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["num_added"] == 3

    appended = dayshift("export", run_dir, "--to", dataset, "--append", "--where", "attempt < 3")
    assert "2 episodes added" in appended.stdout, appended.stderr
    verified = dayshift("verify", dataset, "--no-lerobot", "--json")
    assert json.loads(verified.stdout)["ok"]
    assert json.loads(verified.stdout)["datasets"][0]["episodes"] == len(STORY)

    (dataset / "data/chunk-000/file-001.parquet").write_bytes(b"PAR1")
    verified = dayshift("verify", dataset, "--no-lerobot")
    assert verified.returncode == 1
    assert "data/chunk-000/file-001.parquet" in verified.stdout
    several = dayshift("verify", tmp_path / "nothing", dataset, "--no-lerobot", "--json")
    assert [body["frames"] for body in json.loads(several.stdout)["datasets"]] == [0, 62]
    assert "no dataset here" in json.loads(several.stdout)["datasets"][0]["problems"][0]
    repaired = dayshift("repair", dataset, run_dir)
    assert repaired.returncode == 1
    assert "kept 3 episodes, dropped 2" in repaired.stdout
    assert f"{run_dir}: nothing to repair" in repaired.stdout


def test_pictures_are_there_or_are_rendered(run_dir: Path, dayshift: Callable[..., Done]) -> None:
    done = dayshift("prerender", run_dir, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[str(run_dir)] == {"num_rendered": 0, "num_present": 5, "broken": {}}


def test_the_recorder_is_measured_with_a_runs_own_frames(
    run_dir: Path, dayshift: Callable[..., Done]
) -> None:
    done = dayshift("bench", "record", run_dir, "--robots", 2, "--duration-s", 1, "--episodes", 10, "--json")
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    for row in measured["waits"]:
        assert row["num_frames"] == row["num_written"] > 0  # never a dropped frame
        assert row["p50_ms"] <= row["p99_ms"] <= row["longest_ms"]
    assert [(row["first"], row["last"]) for row in measured["episodes"]] == [(n, n) for n in range(1, 11)]
    assert [path.name for path in run_dir.iterdir() if path.name.startswith("tmp")] == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--codec", "mpeg2"], "--codec: found mpeg2, allowed: h264, av1"),
        (["--cameras", "agentview,front"], "--cameras: found front, allowed: agentview, wrist, none"),
        (["--where", "outcom = 1"], "no such column: outcom; allowed names: run_id"),
        (["--only", "done", "--where", "shift > 9"], "none of 5 recorded attempts was selected"),
    ],
)
def test_a_mistake_is_one_line(
    run_dir: Path, tmp_path: Path, dayshift: Callable[..., Done], arguments: list[str], expected: str
) -> None:
    done = dayshift("export", run_dir, "--to", tmp_path / "dataset", *arguments)
    assert done.returncode != 0
    assert expected in done.stderr.splitlines()[-1]
    assert not (tmp_path / "dataset").exists()
