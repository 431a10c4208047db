"""The expert driven off course comes back, and what is recorded is what it would have done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dayshift.policy.training.demonstrations import (
    Demonstration,
    DisturbedExpert,
    cut,
    demonstrate,
    load,
    record,
    save,
)
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.tasks import find_task
from dayshift.sim.types import Frame, RolloutSpec, RolloutStart
from dayshift.types import Outcome


def _spec(task: str, seed: int) -> RolloutSpec:
    return RolloutSpec(task=task, init_state_id=3, seed=seed, max_steps=300, instruction=task)


def test_a_pushed_expert_still_succeeds_and_records_its_own_actions(env: LiberoEnv) -> None:
    policy = DisturbedExpert(env, is_disturbed=True)
    frames: list[Frame] = []
    result = rollout(env, policy, _spec("turn on the stove", 1), lambda *_: None, frames.append)
    assert result.outcome is Outcome.DONE
    labels = [label for label in policy.labels if label is not None]
    assert len(labels) == len(frames)  # this seed does not lose its grip
    differs = np.stack([frame.action for frame in frames]) != np.stack(labels)
    assert 2 <= differs.any(axis=1).sum() < len(frames) / 2


def test_an_expert_that_loses_its_grip_begins_again(env: LiberoEnv) -> None:
    first, second = demonstrate(env, _spec("put the bowl on the stove", 3), is_disturbed=True)
    assert first.actions[-1, 6] == 1.0  # it held the bowl
    assert second.actions[0, 6] == -1.0  # and opens its hand to take it once more
    assert len(first.actions) == len(first.is_disturbed) == len(first.joint_positions)
    assert first.fixture_poses == second.fixture_poses


def test_an_undisturbed_attempt_is_one_demonstration_as_executed(env: LiberoEnv) -> None:
    (demonstration,) = demonstrate(env, _spec("turn on the stove", 0), is_disturbed=False)
    assert not demonstration.is_disturbed.any()


@pytest.mark.parametrize(
    ("labelled", "runs"),
    [("111", [(0, 3)]), ("0110", [(1, 3)]), ("10011", [(0, 1), (3, 5)]), ("000", [])],
)
def test_runs_of_labelled_steps_are_cut_out(
    env: LiberoEnv, labelled: str, runs: list[tuple[int, int]]
) -> None:
    env.reset(seed=0)
    frames = [
        Frame(
            index=index,
            sim_state=np.full(env.scene.state().shape, index, dtype=np.float64),
            robot_state=np.zeros(8, np.float32),
            action=np.zeros(7, np.float32),
            reward=0.0,
            success=False,
        )
        for index in range(len(labelled))
    ]
    labels = [np.full(7, mark == "1", dtype=np.float32) if mark == "1" else None for mark in labelled]
    start = RolloutStart(fixture_poses={}, sim_state=frames[0].sim_state, protocol={})
    found = cut(env, _spec("turn on the stove", 0), start, frames, labels)
    assert [(int(d.joint_positions[0, 0]), int(d.joint_positions[-1, 0]) + 1) for d in found] == runs
    assert all(d.is_disturbed.all() for d in found)


def test_a_file_gives_back_what_was_saved(
    tmp_path: Path, make_demonstration: Callable[..., Demonstration]
) -> None:
    demonstrations = [make_demonstration(1), make_demonstration(2, num_steps=3)]
    save(tmp_path / "attempt.npz", demonstrations)
    loaded = load(tmp_path / "attempt.npz")
    assert [d.task for d in loaded] == [d.task for d in demonstrations]
    for ours, theirs in zip(demonstrations, loaded, strict=True):
        assert ours.fixture_poses == theirs.fixture_poses
        for name in ("joint_positions", "robot_states", "actions", "is_disturbed"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert [path.name for path in tmp_path.iterdir()] == ["attempt.npz"]


def test_recorded_attempts_are_not_run_again(tmp_path: Path) -> None:
    task = find_task("turn on the stove")
    save(tmp_path / f"{task.name}-0000.npz", [])
    assert list(record([task], tmp_path, num_episodes=1, parallel=1)) == []
