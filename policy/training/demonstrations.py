"""Demonstrations of the scripted expert, with disturbances that it corrects; recorded without rendering.

Three things drive the expert off course, so that a policy learns to come back:

* the objects and the hand start a little elsewhere than LIBERO's initial state has them;
* now and then the hand is pushed for a few control steps. What is recorded at these steps is what the expert
  would have done there (DART, arXiv:1703.09327);
* the fingers open while they hold something; the expert notices and begins again.

It also begins again when it has come to the end of its script without success; what it did before is
forgotten.

What is kept of an attempt is where everything was at each control step (joint positions, fixture poses), so
that the cameras are rendered when they are wanted, and one file per attempt, so that recording can go on.
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
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.rollout import rollout
from dayshift.sim.tasks import LiberoTask
from dayshift.sim.types import Action, Frame, Observation, RolloutSpec, RolloutStart
from dayshift.types import Outcome

NUM_TRAINING_STATES = 40  # init states 0 … 39; the rest is held out
MAX_STEPS = 400  # of an attempt: more than LIBERO's, because the expert may begin again

_OPEN, _CLOSED = -1.0, 1.0
_FREE_JOINT = 0  # MuJoCo's type of an object's joint
_OBJECT_SHIFT_M = 0.007
_START_PUSH_STEPS = (4, 14)  # control steps, of every second attempt
_PUSH_PROBABILITY = 0.015  # per control step
_PUSH_STEPS = (2, 6)
_PUSH_SIZE = np.array([0.6, 0.6, 0.6, 0.2, 0.2, 0.2])  # standard deviation of the six motion numbers
_FINGERS_PUSHED = 0.3  # of the pushes: open fingers are closed, too
_LOSES_GRIP = 0.4  # of the attempts
_GRIP_STEPS = (6, 45)  # control steps with closed fingers before the grip is lost
_SLIP_STEPS = (4, 6)
_UNAWARE_STEPS = (0, 14)  # control steps before the expert notices


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Consecutive control steps of a successful attempt, up to its end or to a loss of grip.

    `actions` are the expert's; at the steps in `is_disturbed` something else was executed.
    """

    task: str  # as `find_task` takes it
    fixture_poses: dict[str, tuple[float, ...]]
    joint_positions: NDArray[np.float32]  # (num_steps, nq)
    robot_states: NDArray[np.float32]  # (num_steps, 8)
    actions: NDArray[np.float32]  # (num_steps, 7)
    is_disturbed: NDArray[np.bool_]  # (num_steps,)


class DisturbedExpert:
    """The scripted expert, driven off now and then.

    `labels` are its own actions of the rollout, None where it failed or did not know yet what had happened.
    """

    def __init__(self, env: LiberoEnv, *, is_disturbed: bool) -> None:
        self._env = env
        self._expert = ScriptedExpert(env)
        self._is_disturbed = is_disturbed
        self.labels: list[Action | None] = []

    def reset(self, spec: RolloutSpec) -> None:
        self._spec = spec
        self._rng = np.random.default_rng(spec.seed)
        self._num_pushes_left = self._num_grip_steps = 0
        self._slip_at: int | None = None
        self.labels = []
        if self._is_disturbed:
            self._shift_objects()
            if self._rng.random() < 0.5:
                self._push(_START_PUSH_STEPS)
            if self._rng.random() < _LOSES_GRIP:
                self._slip_at = self._draw(_GRIP_STEPS)
        self._num_slip_steps, self._num_unaware_steps = self._draw(_SLIP_STEPS), self._draw(_UNAWARE_STEPS)
        self._begin()

    def act(self, observation: Observation) -> Action:
        label = self._expert.act(observation)
        if self._expert.is_over:
            self.labels[self._begun_at :] = [None] * (len(self.labels) - self._begun_at)
            self._begin()
            label = self._expert.act(observation)
        self._num_grip_steps += label[6] > 0
        if self._slip_at is not None and self._num_grip_steps > self._slip_at:
            return self._lose_grip(label)
        self.labels.append(label)
        if not self._is_disturbed:
            return label
        if self._num_pushes_left == 0 and self._rng.random() < _PUSH_PROBABILITY:
            self._push(_PUSH_STEPS)
        if self._num_pushes_left == 0:
            return label
        self._num_pushes_left -= 1
        action = label.copy()
        action[:6] += self._push_by
        if self._closes_fingers:
            action[6] = _CLOSED
        return np.clip(action, -1.0, 1.0)

    def _lose_grip(self, label: Action) -> Action:
        """The fingers open, then the hand goes on for a while as if nothing had happened."""
        self.labels.append(None)
        action = label.copy()
        if self._num_slip_steps:
            self._num_slip_steps -= 1
            action[6] = _OPEN
        else:
            self._num_unaware_steps -= 1
            action[6] = _CLOSED
        if self._num_slip_steps == 0 and self._num_unaware_steps <= 0:
            self._slip_at = None
            self._begin()
        return action

    def _begin(self) -> None:
        """The script from its first line, wherever things are now."""
        self._expert.reset(self._spec)
        self._begun_at = len(self.labels)

    def _push(self, num_steps: tuple[int, int]) -> None:
        self._num_pushes_left = self._draw(num_steps)
        self._push_by = self._rng.normal(0.0, _PUSH_SIZE)
        self._closes_fingers = self._rng.random() < _FINGERS_PUSHED

    def _shift_objects(self) -> None:
        scene = self._env.scene
        for joint_id in np.flatnonzero(scene.model.jnt_type == _FREE_JOINT):
            first = scene.model.jnt_qposadr[joint_id]
            scene.data.qpos[first : first + 2] += self._rng.uniform(-_OBJECT_SHIFT_M, _OBJECT_SHIFT_M, 2)
        scene.set_state(scene.state())  # poses and contacts follow

    def _draw(self, bounds: tuple[int, int]) -> int:
        return int(self._rng.integers(bounds[0], bounds[1] + 1))


def record(tasks: Sequence[LiberoTask], folder: Path, *, num_episodes: int, parallel: int) -> Iterator[int]:
    """`num_episodes` attempts per task, each a file in `folder`; those that are there are not run again.

    Three of four are disturbed. Initial states are the training ones, in turn. Yields the number of
    demonstrations that each attempt gave, in any order: none if it failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (folder / f"{task.name}-{number:04d}.npz", _spec(task, number))
        for number in range(num_episodes)
        for task in tasks
    ]
    missing = [(path, spec) for path, spec in jobs if not path.exists()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parallel, mp_context=context) as pool:
        yield from pool.map(_record_file, missing)


def save(path: Path, demonstrations: Sequence[Demonstration]) -> None:
    """Write the demonstrations of one attempt, whole or not at all."""
    arrays: dict[str, Any] = {}
    for number, demonstration in enumerate(demonstrations):
        poses = demonstration.fixture_poses
        arrays |= {
            f"{number}/task": np.array(demonstration.task),
            f"{number}/fixtures": np.array(list(poses)),
            f"{number}/fixture_poses": np.array(list(poses.values())),
            f"{number}/joint_positions": demonstration.joint_positions,
            f"{number}/robot_states": demonstration.robot_states,
            f"{number}/actions": demonstration.actions,
            f"{number}/is_disturbed": demonstration.is_disturbed,
        }
    draft = path.with_suffix(".unfinished")
    with draft.open("wb") as file:
        np.savez_compressed(file, num_demonstrations=np.array(len(demonstrations)), **arrays)
    draft.rename(path)


def load(path: Path) -> list[Demonstration]:
    """Inverse of `save`."""
    with np.load(path) as arrays:
        return [
            Demonstration(
                task=str(arrays[f"{number}/task"]),
                fixture_poses={
                    str(name): tuple(map(float, pose))
                    for name, pose in zip(
                        arrays[f"{number}/fixtures"], arrays[f"{number}/fixture_poses"], strict=True
                    )
                },
                joint_positions=arrays[f"{number}/joint_positions"],
                robot_states=arrays[f"{number}/robot_states"],
                actions=arrays[f"{number}/actions"],
                is_disturbed=arrays[f"{number}/is_disturbed"],
            )
            for number in range(int(arrays["num_demonstrations"]))
        ]


def _spec(task: LiberoTask, number: int) -> RolloutSpec:
    return RolloutSpec(
        task=task.name_in_suite,
        init_state_id=number % NUM_TRAINING_STATES,
        seed=number,
        max_steps=MAX_STEPS,
        instruction=task.sentence,
    )


@functools.cache
def _env() -> LiberoEnv:
    """Of this process of the pool; a scene takes seconds to compile."""
    return LiberoEnv()


def _record_file(job: tuple[Path, RolloutSpec]) -> int:
    """In a process of the pool."""
    path, spec = job
    demonstrations = demonstrate(_env(), spec, is_disturbed=spec.seed % 4 != 0)
    save(path, demonstrations)
    return len(demonstrations)


def demonstrate(env: LiberoEnv, spec: RolloutSpec, *, is_disturbed: bool) -> list[Demonstration]:
    """One attempt; nothing if it fails."""
    policy = DisturbedExpert(env, is_disturbed=is_disturbed)
    starts: list[RolloutStart] = []
    frames: list[Frame] = []
    result = rollout(env, policy, spec, lambda _, start: starts.append(start), frames.append)
    if result.outcome is not Outcome.DONE:
        return []
    return cut(env, spec, starts[0], frames, policy.labels)


def cut(
    env: LiberoEnv,
    spec: RolloutSpec,
    start: RolloutStart,
    frames: Sequence[Frame],
    labels: Sequence[Action | None],
) -> list[Demonstration]:
    """The runs of consecutive steps that have a label."""
    num_joints = env.scene.model.nq
    edges = np.flatnonzero(np.diff([False, *(label is not None for label in labels), False]))
    demonstrations = []
    for first, end in edges.reshape(-1, 2):
        steps = frames[first:end]
        actions = np.stack([label for label in labels[first:end] if label is not None])
        executed = np.stack([frame.action for frame in steps])
        demonstrations.append(
            Demonstration(
                task=spec.task,
                fixture_poses=dict(start.fixture_poses),
                joint_positions=np.stack([frame.sim_state[1 : 1 + num_joints] for frame in steps]).astype(
                    np.float32
                ),
                robot_states=np.stack([frame.robot_state for frame in steps]),
                actions=actions,
                is_disturbed=(executed != actions).any(axis=1),
            )
        )
    return demonstrations
