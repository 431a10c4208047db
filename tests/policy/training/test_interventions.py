"""The expert takes over from a policy that does nothing useful, and only it is recorded."""

from __future__ import annotations

import numpy as np
import pytest

from dayshift.policy.smolvla.dummy import write_dummy_checkpoint
from dayshift.policy.training.interventions import Intervention, LocalPolicy, intervene, touches_something
from dayshift.policy.training.vlm import IMAGE_SIDE
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.types import Frame, RolloutSpec
from dayshift.types import Outcome

SPEC = RolloutSpec(
    task="put the bowl on the plate",
    init_state_id=3,
    seed=2,
    max_steps=300,
    instruction="put the bowl on the plate",
    image_size=IMAGE_SIDE,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LocalPolicy:
    folder = tmp_path_factory.mktemp("policy")
    write_dummy_checkpoint(folder, "small")
    return LocalPolicy(folder, n_action_steps=4)


def test_the_policy_acts_until_the_expert_takes_over(env: LiberoEnv, policy: LocalPolicy) -> None:
    actor = Intervention(env, policy)
    frames: list[Frame] = []
    result = rollout(env, actor, SPEC, lambda *_: None, frames.append)
    assert result.outcome is Outcome.DONE
    assert actor.has_taken_over
    taken_over_at = [label is not None for label in actor.labels].index(True)
    assert 0 < taken_over_at < len(frames)
    assert all(label is not None for label in actor.labels[taken_over_at:])
    has_images = [bool(frame.images) for frame in frames]
    assert has_images[:taken_over_at] == [step % 4 == 0 for step in range(taken_over_at)]
    assert not any(has_images[taken_over_at + 1 :])


def test_only_the_experts_part_is_a_demonstration(env: LiberoEnv, policy: LocalPolicy) -> None:
    (demonstration,) = intervene(env, policy, SPEC)
    assert not demonstration.is_disturbed.any()
    assert demonstration.actions[0, 6] == -1.0  # the script's first line: an open hand


def test_a_hand_that_holds_something_touches_it(env: LiberoEnv) -> None:
    env.reset(seed=0, options={"task": "put the bowl on the plate", "init_state_id": 0})
    assert not touches_something(env)
    for _ in range(60):  # straight down, onto the table
        env.scene.step(np.array([0, 0, -1, 0, 0, 0, -1], dtype=np.float32))
    assert touches_something(env)
