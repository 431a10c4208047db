from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dayshift.sim.rollout import rollout
from dayshift.sim.types import Frame, Observation, RolloutSpec, RolloutStart
from dayshift.types import Outcome


class Wobble:
    """A policy that moves about, the same way each time."""

    def reset(self, spec: RolloutSpec) -> None:
        self._rng = np.random.default_rng(7)

    def act(self, observation: Observation) -> np.ndarray:
        return self._rng.uniform(-1, 1, 7).astype(np.float32)


class Looker(Wobble):
    """Wants the images at every third control step, and remembers the steps at which it saw any."""

    def reset(self, spec: RolloutSpec) -> None:
        super().reset(spec)
        self.step, self.saw = 0, []

    def needs_images(self) -> bool:
        return self.step % 3 == 0

    def act(self, observation: Observation) -> np.ndarray:
        if observation.images:
            self.saw.append(self.step)
        self.step += 1
        return super().act(observation)


SPEC = RolloutSpec(
    task="put the cream cheese in the bowl",
    init_state_id=2,
    seed=4,
    max_steps=20,
    instruction="put the cream cheese in the bowl",
    image_size=32,
)


def record(env, policy, spec: RolloutSpec):
    starts: list[RolloutStart] = []
    frames: list[Frame] = []
    result = rollout(env, policy, spec, lambda _, start: starts.append(start), frames.append)
    return result, starts[0], frames


def test_same_spec_same_trajectory_rendered_or_not(env) -> None:
    _, start, frames = record(env, Wobble(), SPEC)
    _, start_again, frames_again = record(env, Wobble(), dataclasses.replace(SPEC, camera_hz=20))
    np.testing.assert_array_equal(start.sim_state, start_again.sim_state)
    for frame, again in zip(frames, frames_again, strict=True):
        np.testing.assert_array_equal(frame.sim_state, again.sim_state)
        np.testing.assert_array_equal(frame.robot_state, again.robot_state)


def test_recorded_actions_replayed_from_the_start_give_every_state(env) -> None:
    _, start, frames = record(env, Wobble(), SPEC)
    env.scene.reset(0, seed=99)
    env.scene.restore(start.fixture_poses, start.sim_state)
    for frame in frames:
        np.testing.assert_array_equal(env.scene.state(), frame.sim_state)
        env.scene.step(frame.action)


def test_every_control_step_is_a_frame_and_the_outcome_is_the_success_test(env) -> None:
    result, _, frames = record(env, Wobble(), SPEC)
    assert result.outcome is Outcome.FAILED
    assert "20 control steps" in result.detail
    assert result.num_control_steps == 20
    assert [frame.index for frame in frames] == list(range(20))
    assert not any(frame.success for frame in frames)


@pytest.mark.parametrize(("camera_hz", "steps"), [(0, []), (4, [0, 5, 10, 15]), (20, list(range(20)))])
def test_live_images_only_as_often_as_asked(env, camera_hz, steps) -> None:
    spec = dataclasses.replace(SPEC, camera_hz=camera_hz, cameras=("wrist",))
    _, _, frames = record(env, Wobble(), spec)
    assert [frame.index for frame in frames if frame.images] == steps
    assert all(frame.images["wrist"].shape == (32, 32, 3) for frame in frames if frame.images)


def test_a_vision_policy_gets_images_when_it_wants_them(env) -> None:
    policy = Looker()
    _, _, frames = record(env, policy, SPEC)
    assert policy.saw == [0, 3, 6, 9, 12, 15, 18]
    assert [frame.index for frame in frames if frame.images] == policy.saw
