"""Demonstrations survive lerobot's dataset."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dayshift.policy.training.dataset import (
    open_dataset,
    read_demonstrations,
    sentences_of,
    write_dataset,
)
from dayshift.policy.training.demonstrations import Demonstration


def test_what_lerobot_reads_is_what_was_demonstrated(
    tmp_path: Path, make_demonstration: Callable[..., Demonstration]
) -> None:
    demonstrations = [
        make_demonstration(1),
        make_demonstration(2, num_steps=3, task="libero_goal/put_the_bowl_on_the_plate"),
        make_demonstration(3, num_steps=1),
    ]
    assert write_dataset(demonstrations, tmp_path / "dataset") == 3
    dataset = open_dataset(tmp_path / "dataset")
    assert dataset.num_episodes == 3
    assert sentences_of(dataset) == ["turn on the stove", "put the bowl on the plate"]
    read = read_demonstrations(dataset)
    assert [d.task for d in read] == ["turn on the stove", "put the bowl on the plate", "turn on the stove"]
    for ours, theirs in zip(demonstrations, read, strict=True):
        assert theirs.fixture_poses == ours.fixture_poses
        for name in ("joint_positions", "robot_states", "actions", "is_disturbed"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
