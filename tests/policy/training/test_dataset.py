"""Demonstrations survive lerobot's dataset, and episodes with images come out of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from dayshift.policy.training.dataset import (
    ACTION,
    STATE,
    episodes_of,
    open_dataset,
    read_demonstrations,
    sentences_of,
    write_dataset,
    write_recordings,
)
from dayshift.policy.training.demonstrations import Demonstration, save
from dayshift.policy.training.episodes import CAMERA_FEATURES
from dayshift.policy.training.vlm import IMAGE_SIDE
from dayshift.types import DayshiftError


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


def test_recordings_become_one_dataset(
    tmp_path: Path, make_demonstration: Callable[..., Demonstration]
) -> None:
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    save(recordings / "a.npz", [make_demonstration(1), make_demonstration(2)])
    save(recordings / "b.npz", [])  # an attempt that failed
    assert write_recordings(recordings, tmp_path / "dataset") == 2
    read = read_demonstrations(open_dataset(tmp_path / "dataset"))
    np.testing.assert_array_equal(read[1].actions, make_demonstration(2).actions)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "recordings"]


def test_recordings_of_failures_only_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.npz", [])
    with pytest.raises(DayshiftError, match="no successful attempt"):
        write_recordings(tmp_path, tmp_path / "dataset")


def test_episodes_of_a_dataset_with_images(tmp_path: Path) -> None:
    """As one that was exported; of seven control steps every third has images, the last one among them."""
    image = {"dtype": "image", "shape": (IMAGE_SIDE, IMAGE_SIDE, 3), "names": ["height", "width", "channel"]}
    features = {
        **dict.fromkeys(CAMERA_FEATURES, image),
        STATE: {"dtype": "float32", "shape": (8,), "names": None},
        ACTION: {"dtype": "float32", "shape": (7,), "names": None},
    }
    dataset = LeRobotDataset.create(
        repo_id="test/images", fps=20, features=features, root=tmp_path / "dataset", use_videos=False
    )
    for episode in range(2):
        for step in range(7):
            number = 10 * episode + step
            views = {
                name: np.full((IMAGE_SIDE, IMAGE_SIDE, 3), number + 100 * camera, np.uint8)
                for camera, name in enumerate(CAMERA_FEATURES)
            }
            state, action = np.full(8, number, np.float32), np.full(7, -number, np.float32)
            dataset.add_frame({**views, STATE: state, ACTION: action, "task": f"task {episode}"})
        dataset.save_episode()
    dataset.finalize()
    opened = open_dataset(tmp_path / "dataset")
    episodes = sorted(episodes_of(opened, image_stride=3, parallel=1, seed=0), key=lambda e: e.sentence)
    assert [episode.sentence for episode in episodes] == ["task 0", "task 1"]
    for first, episode in zip((0, 10), episodes, strict=True):
        assert episode.image_steps.tolist() == [0, 3, 6]
        assert episode.states[:, 0].tolist() == list(range(first, first + 7))
        assert episode.actions[:, 6].tolist() == [-number for number in range(first, first + 7)]
        assert episode.images[:, :, 0, 5, 5].tolist() == [[n, n + 100] for n in (first, first + 3, first + 6)]
