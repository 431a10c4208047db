"""Demonstrations and episodes that need no simulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dayshift.policy.training.demonstrations import Demonstration
from dayshift.policy.training.episodes import CAMERA_FEATURES, Episode
from dayshift.policy.training.vlm import IMAGE_SIDE

NUM_JOINTS = 41


@pytest.fixture
def make_demonstration() -> Callable[..., Demonstration]:
    def make(
        seed: int = 0, *, num_steps: int = 12, task: str = "libero_goal/turn_on_the_stove"
    ) -> Demonstration:
        rng = np.random.default_rng(seed)
        return Demonstration(
            task=task,
            fixture_poses={
                name: tuple(rng.normal(size=7).astype(np.float32).tolist()) for name in ("cabinet", "stove")
            },
            joint_positions=rng.normal(size=(num_steps, NUM_JOINTS)).astype(np.float32),
            robot_states=rng.normal(size=(num_steps, 8)).astype(np.float32),
            actions=rng.uniform(-1, 1, (num_steps, 7)).astype(np.float32),
            is_disturbed=rng.random(num_steps) < 0.2,
        )

    return make


@pytest.fixture
def make_episode() -> Callable[..., Episode]:
    """Images and actions say at which control step of which episode they were taken."""

    def make(
        number: int = 0,
        *,
        num_steps: int = 12,
        image_stride: int = 1,
        disturbed: tuple[int, ...] = (),
        sentence: str = "turn on the stove",
    ) -> Episode:
        steps = np.arange(0, num_steps, image_stride)
        images = np.zeros((len(steps), len(CAMERA_FEATURES), 3, IMAGE_SIDE, IMAGE_SIDE), np.uint8)
        images += (10 * number + steps).astype(np.uint8)[:, None, None, None, None]
        numbers = (100 * number + np.arange(num_steps, dtype=np.float32))[:, None]
        return Episode(
            sentence=sentence,
            image_steps=steps,
            images=images,
            states=np.repeat(numbers, 8, axis=1),
            actions=np.repeat(numbers, 7, axis=1),
            is_disturbed=np.isin(np.arange(num_steps), disturbed),
        )

    return make
