"""`dayshift eval` as its users type it."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import pytest
import websockets.sync.server

from dayshift.dataset_export.durable import only_writer
from dayshift.engine.array_packing import pack
from dayshift.experiments.evaluation.plan import EvaluationPlan
from dayshift.experiments.evaluation.records import EvaluationFolder
from tests.experiments.conftest import Dayshift

_MET = """
plan:
  {num_shifts: 1, jobs_per_shift: 1, steps_per_job: 2, tasks: [turn on the stove, put the bowl on the plate]}
planner: {memory: oracle}
policy: scripted_expert
sim: {max_steps: 10, image_size: 64}
"""
SHORT = ("--tasks", "turn on the stove", "--max-steps", "10", "--trials", "1", "--image-size", "64")


def evaluated(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
def test_a_replay_repeats_an_evaluation_to_the_step(dayshift: Dayshift, tmp_path: Path) -> None:
    common = ("--tasks", "7", "--trials", "2", "--parallel", "2", "--json")
    first = evaluated(dayshift("eval", "--policy", "expert", *common, "--out", "first"))
    (arm,) = first["arms"]
    assert (arm["num_done"], arm["num_episodes"], arm["num_infra"]) == (2, 2, 0)
    assert first["protocol"]["mujoco"] == "3.3.7"
    assert first["protocol"]["max_steps"] == "300"
    replay = ("--policy", "replay", "--replay-of", "first", "--out", "second", "--compare", "first")
    second = evaluated(dayshift("eval", *replay, *common))
    lengths = [
        sorted((e["init_state_id"], e["num_control_steps"]) for e in report["episodes"])
        for report in (first, second)
    ]
    assert lengths[0] == lengths[1]
    (comparison,) = second["comparisons"]
    assert (comparison["both"], comparison["p_value"]) == (2, 1.0)


@pytest.mark.timeout(600)
def test_failures_are_filmed_and_a_stopped_evaluation_goes_on(dayshift: Dayshift, tmp_path: Path) -> None:
    report = evaluated(dayshift("eval", "--policy", "expert", *SHORT, "--out", "e", "--json"))
    assert report["arms"][0]["num_done"] == 0
    folder = Path(report["folder"]) if Path(report["folder"]).is_absolute() else tmp_path / report["folder"]
    with av.open(str(folder / "videos" / "task7-trial0.mp4")) as video:
        stream = video.streams.video[0]
        assert (stream.width, stream.height) == (128, 64)
        assert stream.frames == 3
    (folder / "episodes.jsonl").write_text('{"task": 7, "tri')  # killed in the middle of its only line
    again = evaluated(dayshift("eval", "--resume", "e", "--json"))
    assert [e["num_control_steps"] for e in again["episodes"]] == [10]
    lines = (folder / "episodes.jsonl").read_text()
    (folder / "episodes.jsonl").write_text(lines.replace('"failed"', '"infra"'))
    repaired = evaluated(dayshift("eval", "--resume", "e", "--json"))  # what broke is run again
    assert [e["outcome"] for e in repaired["episodes"]] == ["failed"]
    assert repaired["arms"][0]["num_infra"] == 0


@pytest.mark.timeout(600)
def test_what_a_run_met_is_met_again(dayshift: Dayshift, tmp_path: Path) -> None:
    (tmp_path / "met.yaml").write_text(_MET)
    done = dayshift("run", "met.yaml", "--runs-dir", "runs", "--json")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    again = ("--as-in", str(run), "--trials", "2", "--max-steps", "10", "--image-size", "64")
    report = evaluated(dayshift("eval", "--policy", "expert", *again, "--videos", "none", "--json"))
    starts = Counter((e["task"], e["init_state_id"]) for e in report["episodes"])
    assert {task for task, _ in starts} == {7, 8}
    assert len(starts) >= 2
    assert set(starts.values()) == {2}
    assert report["protocol"]["init_states"] == f"{len(starts)} of a run"


@pytest.mark.timeout(120)
def test_two_evaluations_of_one_folder_are_refused(dayshift: Dayshift, tmp_path: Path) -> None:
    folder = EvaluationFolder(tmp_path / "e")
    folder.create(
        EvaluationPlan(
            policy="expert", suite="libero_goal", tasks=(7,), num_trials=1, max_steps=10, image_size=64
        )
    )
    half_line = '{"task": 7, "tri'  # of the other process
    (folder.path / "episodes.jsonl").write_text(half_line)
    with only_writer(folder.path):
        done = dayshift("eval", "--resume", "e")
    assert done.returncode != 0
    assert "another process is still writing here" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert (folder.path / "episodes.jsonl").read_text() == half_line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --policy, or --resume"),
        (("--policy", "replay"), "--replay-of"),
        (("--policy", "expert", "--suite", "libero_gaol"), "allowed: libero_goal"),
        (("--policy", "expert", "--tasks", "7", "--trials", "51"), "initial states 0 to 49"),
        (("--policy", "expert", "--n-action-steps", "5,x"), "whole numbers"),
        (("--policy", "expert", "--as-in", "run", "--tasks", "7"), "allowed beside it: --trials"),
        (("--policy", "expert", "--as-in", "nowhere"), "nowhere"),
        (("--policy", "/nowhere"), "does not exist"),
        (("--policy", "http://127.0.0.1:9"), "no engine answers"),
    ],
)
def test_mistakes_are_one_line(dayshift: Dayshift, arguments: tuple[str, ...], message: str) -> None:
    done = dayshift("eval", *arguments)
    assert done.returncode in (1, 2)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dayshift: ")
    assert message in last


@pytest.fixture
def openpi_server() -> Iterator[tuple[str, list[object]]]:
    """Its address, and who has connected. It greets as openpi's server does, and answers nothing."""
    greeted: list[object] = []

    def greet(socket: websockets.sync.server.ServerConnection) -> None:
        greeted.append(socket)
        socket.send(pack({}, text_keys=False))
        for _ in socket:
            pass

    with websockets.sync.server.serve(greet, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}", greeted
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "n_action_steps must be given"),
        (("--n-action-steps", "4", "--blending", "rtc"), "blending rtc needs a server of ours"),
    ],
)
def test_options_that_a_server_has_no_place_for_show_before_simulators_start(
    dayshift: Dayshift, openpi_server: tuple[str, list[object]], options: tuple[str, ...], message: str
) -> None:
    url, greeted = openpi_server
    done = dayshift("eval", "--policy", url, *options)
    assert (done.returncode, len(greeted)) == (1, 1), "each simulator would have connected, too"
    (line,) = done.stderr.splitlines()
    assert line.startswith("dayshift: ")
    assert message in line
