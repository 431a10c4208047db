"""Demonstrations of the scripted expert, with disturbances that it corrects, as a LeRobot image dataset.

Now and then the hand is driven off by random actions for a few control steps. What is recorded at these
steps is what the expert would have done there, so that a policy learns to come back (DART, arXiv:1703.09327).
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dayshift.policy.expert import ScriptedExpert
from dayshift.sim.libero_env import MAX_STEPS, LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.tasks import LiberoTask
from dayshift.sim.types import CONTROL_HZ, Action, Frame, Observation, RolloutSpec, RolloutStart
from dayshift.types import Outcome

NUM_TRAINING_STATES = 40  # init states 0 … 39; the rest is held out
_BURST_PROBABILITY = 0.02  # per control step
_MIN_BURST, _MAX_BURST = 2, 6  # control steps
_BURST_SIZE = 0.6  # standard deviation of the six motion numbers
_IMAGE_NAMES = {"agentview": "observation.images.image", "wrist": "observation.images.image2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One successful episode, frame by frame."""

    sentence: str
    images: dict[str, NDArray[np.uint8]]  # camera -> (num_frames, height, width, 3)
    states: NDArray[np.float32]  # (num_frames, 8)
    actions: NDArray[np.float32]  # (num_frames, 7): the expert's


class DisturbedExpert:
    """The scripted expert, driven off now and then; `labels` are its own actions of the rollout."""

    def __init__(self, env: LiberoEnv, *, is_disturbed: bool) -> None:
        self._expert = ScriptedExpert(env)
        self._is_disturbed = is_disturbed
        self.labels: list[Action] = []

    def reset(self, spec: RolloutSpec) -> None:
        self._expert.reset(spec)
        self._rng = np.random.default_rng(spec.seed)
        self._num_left = 0
        self.labels = []

    def act(self, observation: Observation) -> Action:
        label = self._expert.act(observation)
        self.labels.append(label)
        if not self._is_disturbed:
            return label
        if self._num_left == 0 and self._rng.random() < _BURST_PROBABILITY:
            self._num_left = int(self._rng.integers(_MIN_BURST, _MAX_BURST + 1))
            self._push = self._rng.normal(0.0, _BURST_SIZE, 6)
        if self._num_left == 0:
            return label
        self._num_left -= 1
        action = label.copy()
        action[:6] += self._push
        return np.clip(action, -1.0, 1.0)


def record(
    tasks: Sequence[LiberoTask], *, num_episodes: int, image_size: int, parallel: int
) -> Iterator[Demonstration | None]:
    """`num_episodes` attempts per task, in any order; None for one that failed.

    Every second one is disturbed. Initial states are the training ones, in turn.
    """
    specs = [
        RolloutSpec(
            task=task.name_in_suite,
            init_state_id=number % NUM_TRAINING_STATES,
            seed=number,
            max_steps=MAX_STEPS,
            instruction=task.sentence,
            camera_hz=CONTROL_HZ,
            image_size=image_size,
        )
        for number in range(num_episodes)
        for task in tasks
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parallel, mp_context=context) as pool:
        yield from pool.map(_demonstrate, specs)


def write_dataset(demonstrations: Iterator[Demonstration | None], folder: Path, *, image_size: int) -> int:
    """Write the successful ones with lerobot, images in the tables; the number of episodes."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    dataset = LeRobotDataset.create(
        repo_id="dayshift/demonstrations",
        fps=CONTROL_HZ,
        features=_features(image_size),
        root=folder,
        robot_type="panda",
        use_videos=False,
    )
    for demonstration in demonstrations:
        if demonstration is None:
            continue
        for index in range(len(demonstration.actions)):
            images = {_IMAGE_NAMES[camera]: frames[index] for camera, frames in demonstration.images.items()}
            dataset.add_frame(
                {
                    **images,
                    "observation.state": demonstration.states[index],
                    "action": demonstration.actions[index],
                    "task": demonstration.sentence,
                }
            )
        dataset.save_episode()
    dataset.finalize()
    return dataset.meta.total_episodes


def _features(image_size: int) -> dict[str, dict[str, Any]]:
    image = {"dtype": "image", "shape": (image_size, image_size, 3), "names": ["height", "width", "channels"]}
    return {
        **dict.fromkeys(_IMAGE_NAMES.values(), image),
        "observation.state": {"dtype": "float32", "shape": (8,), "names": None},
        "action": {"dtype": "float32", "shape": (7,), "names": None},
    }


@functools.cache
def _env() -> LiberoEnv:
    """Of this process of the pool; a scene takes seconds to compile."""
    return LiberoEnv()


def _demonstrate(spec: RolloutSpec) -> Demonstration | None:
    """In a process of the pool."""
    policy = DisturbedExpert(_env(), is_disturbed=spec.seed % 2 == 1)
    frames: list[Frame] = []
    result = rollout(_env(), policy, spec, _ignore_start, frames.append)
    if result.outcome is not Outcome.DONE:
        return None
    return Demonstration(
        sentence=spec.instruction,
        images={camera: np.stack([frame.images[camera] for frame in frames]) for camera in spec.cameras},
        states=np.stack([frame.robot_state for frame in frames]),
        actions=np.stack(policy.labels),
    )


def _ignore_start(spec: RolloutSpec, start: RolloutStart) -> None: ...
