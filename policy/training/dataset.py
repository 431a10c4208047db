"""Demonstrations as a LeRobot v3.0 dataset: states, actions, and what the cameras can be rendered from.

And episodes out of it, or out of a dataset that was exported from a run and holds its images.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from dayshift.policy.training.demonstrations import Demonstration, load
from dayshift.policy.training.episode_files import read_episodes, write_episodes
from dayshift.policy.training.episodes import CAMERA_FEATURES, Episode, rendered
from dayshift.policy.training.vlm import IMAGE_SIDE
from dayshift.sim.tasks import find_task
from dayshift.sim.types import CONTROL_HZ
from dayshift.types import DayshiftError

STATE, ACTION = "observation.state", "action"
JOINTS, FIXTURES, DISTURBED = "joint_positions", "fixture_poses", "is_disturbed"
REPO_ID = "dayshift/demonstrations"
_POSE = ("x", "y", "z", "qw", "qx", "qy", "qz")


def write_dataset(demonstrations: Iterable[Demonstration], folder: Path) -> int:
    """Write with lerobot, one episode each; the number of episodes. `folder` must not exist."""
    dataset: LeRobotDataset | None = None
    for demonstration in demonstrations:
        if dataset is None:
            dataset = LeRobotDataset.create(
                repo_id=REPO_ID,
                fps=CONTROL_HZ,
                features=_features(demonstration),
                root=folder,
                robot_type="panda",
                use_videos=False,
                video_backend="pyav",
            )
        poses = np.concatenate(list(demonstration.fixture_poses.values())).astype(np.float32)
        for index in range(len(demonstration.actions)):
            dataset.add_frame(
                {
                    STATE: demonstration.robot_states[index],
                    ACTION: demonstration.actions[index],
                    JOINTS: demonstration.joint_positions[index],
                    FIXTURES: poses,
                    DISTURBED: demonstration.is_disturbed[index : index + 1],
                    "task": find_task(demonstration.task).sentence,
                }
            )
        dataset.save_episode()
    if dataset is None:
        return 0
    dataset.finalize()
    return dataset.meta.total_episodes


def write_recordings(recordings: Path, folder: Path) -> int:
    """`write_dataset` of all that `demonstrations.save` wrote into `recordings`, whole or not at all.

    Returns the number of episodes. Raises DayshiftError when there is none.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    files = sorted(recordings.glob("*.npz"))
    num_episodes = write_dataset((part for file in files for part in load(file)), unfinished)
    if num_episodes == 0:
        raise DayshiftError(f"{recordings}: found no successful attempt, allowed: at least one")
    unfinished.rename(folder)
    return num_episodes


def open_dataset(folder: Path) -> LeRobotDataset:
    """A dataset on the disk, of ours or exported from a run."""
    return LeRobotDataset(REPO_ID, root=folder, video_backend="pyav")


def sentences_of(dataset: LeRobotDataset) -> list[str]:
    """The instructions in a dataset, in lerobot's order."""
    assert dataset.meta.tasks is not None
    return [str(sentence) for sentence in dataset.meta.tasks.index]


def read_demonstrations(dataset: LeRobotDataset) -> list[Demonstration]:
    """Inverse of `write_dataset`."""
    names = dataset.features[FIXTURES]["names"]
    fixtures = [name.removesuffix(".x") for name in names[:: len(_POSE)]]
    columns = (STATE, ACTION, JOINTS, FIXTURES, DISTURBED, "episode_index", "task_index")
    table = dataset.hf_dataset.select_columns(list(columns)).with_format("numpy")[:]
    sentences = sentences_of(dataset)
    demonstrations = []
    for rows in _episodes(np.asarray(table["episode_index"])):
        poses = np.asarray(table[FIXTURES][rows.start]).reshape(-1, len(_POSE))
        demonstrations.append(
            Demonstration(
                task=sentences[int(table["task_index"][rows.start])],
                fixture_poses={
                    name: tuple(map(float, pose)) for name, pose in zip(fixtures, poses, strict=True)
                },
                joint_positions=np.asarray(table[JOINTS][rows], dtype=np.float32),
                robot_states=np.asarray(table[STATE][rows], dtype=np.float32),
                actions=np.asarray(table[ACTION][rows], dtype=np.float32),
                is_disturbed=np.asarray(table[DISTURBED][rows], dtype=np.bool_).reshape(-1),
            )
        )
    return demonstrations


def episodes_of(dataset: LeRobotDataset, *, image_stride: int, parallel: int, seed: int) -> Iterator[Episode]:
    """All episodes of a dataset, in random order, from `parallel` processes if they must be rendered.

    Only every `image_stride`-th control step has images.
    """
    kept = _rendered_file(dataset, image_stride)
    if kept.is_file():
        yield from read_episodes(kept)
    elif JOINTS in dataset.features:
        demonstrations = read_demonstrations(dataset)
        np.random.default_rng(seed).shuffle(demonstrations)  # type: ignore[arg-type]
        yield from rendered(demonstrations, image_stride=image_stride, parallel=parallel)
    else:
        for index in np.random.default_rng(seed).permutation(dataset.num_episodes):
            yield decoded(dataset, int(index), image_stride=image_stride)


def keep_rendered(dataset: LeRobotDataset, *, image_side: int, image_stride: int, parallel: int) -> None:
    """Put what `episodes_of` gives beside the dataset, unless it is there, and read it from there after that.

    `image_side` is the policy's.
    """
    path = _rendered_file(dataset, image_stride)
    if not path.is_file():
        episodes = episodes_of(dataset, image_stride=image_stride, parallel=parallel, seed=0)
        write_episodes(episodes, path, image_side=image_side)


def _rendered_file(dataset: LeRobotDataset, image_stride: int) -> Path:
    return Path(dataset.root) / f"rendered-every-{image_stride}.npz"


def decoded(dataset: LeRobotDataset, index: int, *, image_stride: int = 1) -> Episode:
    """One episode of a dataset that holds images or videos."""
    assert dataset.meta.episodes is not None
    episode = dataset.meta.episodes[index]
    first, num_steps = episode["dataset_from_index"], episode["length"]
    image_steps = np.arange((num_steps - 1) % image_stride, num_steps, image_stride)
    frames = [cast("dict[str, Any]", dataset[int(first + step)]) for step in image_steps]
    views = torch.stack([torch.stack([frame[name] for name in CAMERA_FEATURES]) for frame in frames])
    if views.shape[-2:] != (IMAGE_SIDE, IMAGE_SIDE):
        size = tuple(views.shape[-2:])
        raise DayshiftError(f"{dataset.root}: images are {size}; allowed: {IMAGE_SIDE} x {IMAGE_SIDE}")
    table = dataset.hf_dataset.select_columns([STATE, ACTION]).with_format("numpy")
    numbers = table[first : first + num_steps]
    return Episode(
        sentence=frames[0]["task"],
        image_steps=image_steps,
        images=(views * 255).round().to(torch.uint8).numpy(),
        states=np.asarray(numbers[STATE], dtype=np.float32),
        actions=np.asarray(numbers[ACTION], dtype=np.float32),
        is_disturbed=np.zeros(num_steps, dtype=np.bool_),
    )


def _episodes(episode_indices: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(episode_indices)) + 1
    bounds = [0, *edges.tolist(), len(episode_indices)]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]


def _features(demonstration: Demonstration) -> dict[str, dict[str, Any]]:
    poses = [f"{name}.{number}" for name in demonstration.fixture_poses for number in _POSE]
    num_joints = demonstration.joint_positions.shape[1]
    return {
        STATE: {"dtype": "float32", "shape": (8,), "names": None},
        ACTION: {"dtype": "float32", "shape": (7,), "names": None},
        JOINTS: {"dtype": "float32", "shape": (num_joints,), "names": None},
        FIXTURES: {"dtype": "float32", "shape": (len(poses),), "names": poses},
        DISTURBED: {"dtype": "bool", "shape": (1,), "names": None},
    }
