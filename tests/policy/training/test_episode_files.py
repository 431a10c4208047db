"""What was rendered once comes back, as small as the policy sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from dayshift.policy.training.dataset import ACTION, STATE, episodes_of, keep_rendered, open_dataset
from dayshift.policy.training.episode_files import read_episodes, write_episodes
from dayshift.policy.training.episodes import CAMERA_FEATURES, Episode
from dayshift.policy.training.vlm import IMAGE_SIDE


def _smooth(episode: Episode) -> Episode:
    """With ramps for images, another one for each view and colour."""
    ramp = np.arange(IMAGE_SIDE)
    plane = ramp[:, None] // 2 + ramp[None, :] // 2
    offsets = np.arange(np.prod(episode.images.shape[:3])).reshape(episode.images.shape[:3])
    return replace(episode, images=(plane + offsets[..., None, None]).astype(np.uint8))


@pytest.mark.parametrize("image_side", [IMAGE_SIDE, IMAGE_SIDE // 2])
def test_episodes_come_back(tmp_path: Path, make_episode: Callable[..., Episode], image_side: int) -> None:
    episodes = [
        _smooth(make_episode(0, num_steps=7, image_stride=3, disturbed=(2, 5))),
        _smooth(make_episode(1, num_steps=1, sentence="put the bowl on the plate")),
    ]
    assert write_episodes(iter(episodes), tmp_path / "episodes.npz", image_side=image_side) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["episodes.npz"]
    read = list(read_episodes(tmp_path / "episodes.npz"))
    assert [episode.sentence for episode in read] == ["turn on the stove", "put the bowl on the plate"]
    factor = IMAGE_SIDE // image_side
    for ours, theirs in zip(episodes, read, strict=True):
        for name in ("image_steps", "states", "actions", "is_disturbed"):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        small = ours.images[..., ::factor, ::factor].astype(int)
        assert theirs.images.shape == small.shape
        assert theirs.images.dtype == np.uint8
        assert np.abs(theirs.images - small).max() <= 6  # of a JPEG


def test_a_dataset_that_was_rendered_is_not_decoded_again(tmp_path: Path) -> None:
    image = {"dtype": "image", "shape": (IMAGE_SIDE, IMAGE_SIDE, 3), "names": ["height", "width", "channel"]}
    dataset = LeRobotDataset.create(
        repo_id="tests/rendered",
        fps=20,
        root=tmp_path / "dataset",
        use_videos=False,
        video_backend="pyav",
        features={
            **dict.fromkeys(CAMERA_FEATURES, image),
            STATE: {"dtype": "float32", "shape": (8,), "names": None},
            ACTION: {"dtype": "float32", "shape": (7,), "names": None},
        },
    )
    for number in (0, 100):
        for step in range(4):
            grey = np.full((IMAGE_SIDE, IMAGE_SIDE, 3), number + step, np.uint8)
            numbers = {STATE: np.full(8, number, np.float32), ACTION: np.full(7, step, np.float32)}
            dataset.add_frame(
                {**dict.fromkeys(CAMERA_FEATURES, grey), **numbers, "task": "turn on the stove"}
            )
        dataset.save_episode()
    dataset.finalize()
    dataset = open_dataset(tmp_path / "dataset")
    live = list(episodes_of(dataset, image_stride=2, parallel=1, seed=0))
    keep_rendered(dataset, image_side=64, image_stride=2, parallel=1)
    kept = list(episodes_of(dataset, image_stride=2, parallel=1, seed=0))
    assert [episode.images.shape for episode in kept] == [(2, 2, 3, 64, 64)] * 2
    for ours, theirs in zip(live, kept, strict=True):
        np.testing.assert_array_equal(ours.states, theirs.states)
        assert np.abs(ours.images[..., ::2, ::2].astype(int) - theirs.images).max() <= 1
    (whole, _) = episodes_of(dataset, image_stride=1, parallel=1, seed=0)  # which has not been kept
    assert whole.images.shape == (4, 2, 3, IMAGE_SIDE, IMAGE_SIDE)
