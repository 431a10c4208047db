from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dayshift.sim.rollout import rollout
from dayshift.sim.types import Fault, RolloutSpec
from dayshift.sim.worker import RobotSimulator
from dayshift.types import DayshiftError, Outcome

from .policies import Idle, Troubled, no_such_model


def spec_of(instruction: str = "", **changes) -> RolloutSpec:
    fields = {
        "task": "turn on the stove",
        "init_state_id": 0,
        "seed": 1,
        "max_steps": 8,
        "instruction": instruction,
        "image_size": 32,
    }
    return RolloutSpec(**(fields | changes))


def run(simulator: RobotSimulator, spec: RolloutSpec, cancel: threading.Event | None = None):
    starts, frames = [], []
    result = simulator.run(spec, lambda _, start: starts.append(start), frames.append, cancel)
    return result, starts, frames


def is_running(process_id: int | None) -> bool:
    """Zombies do not count: they wait for their parent only."""
    try:
        return "Z" not in Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_until_gone(process_id: int) -> None:
    deadline = time.monotonic() + 30
    while is_running(process_id):
        assert time.monotonic() < deadline, f"process {process_id} was left behind"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def simulator():
    with RobotSimulator(Troubled) as simulator:
        yield simulator


def test_a_rollout_in_the_robots_process_is_the_one_in_this_process(simulator, env) -> None:
    spec = spec_of(camera_hz=5)
    result, starts, frames = run(simulator, spec)
    assert result.outcome is Outcome.FAILED
    local = []
    rollout(
        env,
        Idle(env),
        spec,
        lambda _, start: np.testing.assert_array_equal(start.sim_state, starts[0].sim_state),
        local.append,
    )
    for frame, here in zip(frames, local, strict=True):
        np.testing.assert_array_equal(frame.sim_state, here.sim_state)
        assert frame.images.keys() == here.images.keys()
        for camera, image in here.images.items():
            np.testing.assert_array_equal(frame.images[camera], image)


@pytest.mark.parametrize(
    ("trouble", "detail"),
    [
        ("abort", "SIGABRT"),
        ("kill", "SIGKILL"),
        ("raise", "RuntimeError: the policy is"),
        ("disconnect", "ConnectionResetError: policy server went away"),
    ],
)
def test_trouble_costs_one_attempt_and_is_nobodys_failure(simulator, trouble, detail) -> None:
    result, _, frames = run(simulator, spec_of(trouble))
    assert result.outcome is Outcome.INFRA
    assert detail in result.detail
    assert "\n" not in result.detail
    assert result.num_control_steps == len(frames) == 2
    result, _, frames = run(simulator, spec_of())
    assert result.outcome is Outcome.FAILED
    assert len(frames) == 8


def test_a_hang_is_ended_after_its_time_without_a_sign_of_life() -> None:
    with RobotSimulator(Troubled, hang_timeout_s=10.0) as simulator:
        result, _, frames = run(simulator, spec_of("hang"))
        assert result.outcome is Outcome.INFRA
        assert result.detail == "simulator hung: no sign of life for 10 s"
        assert len(frames) == 2
        assert simulator.process_id is None


def test_a_process_that_died_between_rollouts_costs_nothing(simulator) -> None:
    simulator.start()
    os.kill(simulator.process_id, signal.SIGKILL)
    wait_until_gone(simulator.process_id)
    assert run(simulator, spec_of())[0].outcome is Outcome.FAILED


def test_a_cancelled_rollout_ends_and_keeps_its_process(simulator) -> None:
    run(simulator, spec_of())
    process_id, cancel = simulator.process_id, threading.Event()
    frames = []

    def cancel_soon(frame) -> None:
        frames.append(frame)
        cancel.set()

    result = simulator.run(spec_of(max_steps=2000), lambda *_: None, cancel_soon, cancel)
    assert result.outcome is Outcome.INFRA
    assert result.detail == "cancelled"
    assert len(frames) < 2000
    assert run(simulator, spec_of())[0].outcome is Outcome.FAILED
    assert simulator.process_id == process_id


def test_what_a_callback_raises_comes_through_and_the_next_rollout_works(simulator) -> None:
    def full_disk(frame) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        simulator.run(spec_of(), lambda *_: None, full_disk)
    assert run(simulator, spec_of())[0].outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "turn off the stove"}, "turn on the stove"),
        ({"init_state_id": 50}, "0 to 49"),
        ({"fault": Fault(kind="earthquake")}, "gripper_slip"),
    ],
)
def test_a_mistake_in_the_spec_is_the_callers(changes, message) -> None:
    with RobotSimulator(Idle) as simulator:
        with pytest.raises(DayshiftError, match=message):
            run(simulator, spec_of(**changes))
        assert simulator.process_id is None  # nothing was started for it


def test_a_policy_that_cannot_be_made_is_a_mistake_in_one_line() -> None:
    with RobotSimulator(no_such_model) as simulator:
        with pytest.raises(DayshiftError, match=r"^model folder is missing$"):
            run(simulator, spec_of())
        assert simulator.process_id is None


def test_closing_leaves_no_process() -> None:
    with RobotSimulator(Idle) as simulator:
        simulator.start()
        process_id = simulator.process_id
        assert is_running(process_id)
    assert not is_running(process_id)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_when_the_parent_ends_so_does_the_robots_process(end) -> None:
    program = Path(__file__).with_name("run_forever.py")
    with subprocess.Popen(
        [sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            process_id = int(parent.stdout.readline())
            assert is_running(process_id)
            parent.send_signal(end)
            _, errors = parent.communicate(timeout=60)
        finally:
            parent.kill()
    wait_until_gone(process_id)
    assert "Traceback" not in errors
