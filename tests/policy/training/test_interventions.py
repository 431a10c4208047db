"""The expert takes over in a recorded attempt that failed, and only it is recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dayshift.policy.replay import ReplayPolicy
from dayshift.policy.training.demonstrations import Demonstration, load
from dayshift.policy.training.interventions import (
    FailedAttempt,
    intervene,
    record_interventions,
    touches_something,
)
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.types import Frame, RolloutSpec
from dayshift.types import Outcome

SPEC = RolloutSpec(
    task="put the bowl on the plate",
    init_state_id=3,
    seed=2,
    max_steps=40,
    instruction="put the bowl on the plate",
)
ASIDE = np.array([0.2, 0.5, 0, 0, 0, 0, -1], dtype=np.float32)  # with an open hand


@pytest.fixture(scope="module")
def failed(env: LiberoEnv) -> FailedAttempt:
    """A robot that goes aside and does nothing else."""
    frames: list[Frame] = []
    result = rollout(env, ReplayPolicy([ASIDE] * 40), SPEC, lambda *_: None, frames.append)
    assert result.outcome is Outcome.FAILED
    sim_states = np.stack([frame.sim_state for frame in frames])
    return FailedAttempt(attempt_id="robot-1-1.1.1-w1", spec=SPEC, sim_states=sim_states)


def _begins_at(demonstration: Demonstration, attempt: FailedAttempt) -> list[int]:
    """Control steps of the attempt in which everything stands as at the demonstration's beginning."""
    joints = demonstration.joint_positions
    recorded = attempt.sim_states[:, 1 : 1 + joints.shape[1]].astype(np.float32)
    return np.flatnonzero((recorded == joints[0]).all(axis=1)).tolist()


def test_the_expert_finishes_what_failed_from_where_it_was(env: LiberoEnv, failed: FailedAttempt) -> None:
    begun = set()
    for seed in range(3):
        (demonstration,) = intervene(env, failed, seed=seed, is_disturbed=False)
        assert not demonstration.is_disturbed.any()
        assert demonstration.actions[0, 6] == -1.0  # the script's first line: an open hand
        (step,) = _begins_at(demonstration, failed)
        begun.add(step)
    assert len(begun) > 1


def test_the_fixtures_stand_where_they_stood(env: LiberoEnv, failed: FailedAttempt) -> None:
    env.reset(
        seed=SPEC.seed, options={"task": SPEC.task, "init_state_id": SPEC.init_state_id, "max_steps": 40}
    )
    poses = env.scene.fixture_poses()
    (demonstration,) = intervene(env, failed, seed=0, is_disturbed=False)
    assert demonstration.fixture_poses == poses


def test_no_intervention_while_the_hand_touches_something(env: LiberoEnv, failed: FailedAttempt) -> None:
    env.reset(seed=0, options={"task": SPEC.task, "init_state_id": 0})
    assert not touches_something(env)
    for _ in range(60):  # straight down, onto the table
        env.scene.step(np.array([0, 0, -1, 0, 0, 0, -1], dtype=np.float32))
    assert touches_something(env)
    pressed = replace(failed, sim_states=env.scene.state()[None])
    assert intervene(env, pressed, seed=0, is_disturbed=False) == []


def test_each_intervention_is_recorded_once(tmp_path: Path, failed: FailedAttempt) -> None:
    list(record_interventions([failed], tmp_path, num_interventions=1, parallel=1))
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    (again,) = record_interventions([failed], tmp_path, num_interventions=2, parallel=1)
    assert again >= 1
    assert file.stat().st_mtime_ns == written
    parts = [load(path) for path in sorted(tmp_path.iterdir())]
    assert [part[0].is_disturbed.any() for part in parts] == [False, True]
