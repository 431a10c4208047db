"""The expert takes over where a policy went wrong: demonstrations from failed attempts of an operation.

A policy fails where no demonstration has been. The recording of a failed attempt holds the simulator's state
of every control step; one of them is restored, in which the hand touches nothing, and the expert begins its
script there. Only the expert's actions are kept (HG-DAgger, arXiv:1810.02890). With nothing in the hand, what
the expert does first is right wherever the policy was.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dayshift.policy.training.demonstrations import MAX_STEPS, Demonstration, DisturbedExpert, cut, save
from dayshift.sim.libero_env import LiberoEnv
from dayshift.sim.types import Frame, Observation, RolloutSpec

_MAX_DRAWS = 20  # of moments, until the hand is empty in one
_HAND, _ROBOT = "gripper0_", "robot0_"  # of names of bodies


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """What is needed of a recorded attempt to go on from any of its control steps."""

    attempt_id: str
    spec: RolloutSpec
    sim_states: NDArray[np.float64]  # (num_steps, size of the simulator's state)


def record_interventions(
    failed: Sequence[FailedAttempt], folder: Path, *, num_interventions: int, parallel: int
) -> Iterator[int]:
    """`num_interventions` in all, the attempts in turn, each a file in `folder`; none is done twice.

    Every second one is disturbed as demonstrations are. Yields the number of demonstrations that each
    gave: none if the expert failed as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (folder / f"{attempt.attempt_id}-{number // len(failed):04d}.npz", attempt, number)
        for number in range(num_interventions)
        for attempt in [failed[number % len(failed)]]
    ]
    missing = [job for job in jobs if not job[0].exists()]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(parallel, mp_context=context) as pool:
        yield from pool.map(_record_file, missing)


@functools.cache
def _env() -> LiberoEnv:
    """Of this process of the pool; a scene takes seconds to compile."""
    return LiberoEnv()


def _record_file(job: tuple[Path, FailedAttempt, int]) -> int:
    """In a process of the pool."""
    path, attempt, number = job
    demonstrations = intervene(_env(), attempt, seed=number, is_disturbed=number % 2 == 1)
    save(path, demonstrations)
    return len(demonstrations)


def intervene(
    env: LiberoEnv, attempt: FailedAttempt, *, seed: int, is_disturbed: bool
) -> list[Demonstration]:
    """The expert from a control step on that `seed` draws; nothing if it fails.

    Nothing either if the hand touches something in all the moments that are drawn.
    """
    spec = replace(attempt.spec, max_steps=MAX_STEPS)
    options = {"task": spec.task, "init_state_id": spec.init_state_id, "max_steps": spec.max_steps}
    env.reset(seed=spec.seed, options=options)
    if not _restore_empty_hand(env, attempt, np.random.default_rng(seed)):
        return []
    expert = DisturbedExpert(env, is_disturbed=is_disturbed)
    expert.reset(replace(spec, seed=seed))
    start = env.start_record()
    frames: list[Frame] = []
    for index in range(spec.max_steps):
        sim_state, robot_state = env.scene.state(), env.scene.robot_state()
        action = expert.act(Observation(state=robot_state, instruction=spec.instruction))
        _, reward, is_success, _, _ = env.step(action)
        frames.append(
            Frame(
                index=index,
                sim_state=sim_state,
                robot_state=robot_state,
                action=action,
                reward=reward,
                success=is_success,
            )
        )
        if is_success:
            return cut(env, spec, start, frames, expert.labels)
    return []


def _restore_empty_hand(env: LiberoEnv, attempt: FailedAttempt, rng: np.random.Generator) -> bool:
    """Put the scene into a random control step of the attempt; whether one with an empty hand was found."""
    for step in rng.integers(len(attempt.sim_states), size=_MAX_DRAWS):
        env.scene.set_state(attempt.sim_states[step])
        if not touches_something(env):
            return True
    return False


def touches_something(env: LiberoEnv) -> bool:
    """Whether hand or fingers are in contact with anything but the robot itself."""
    model, contact = env.scene.model, env.scene.data.contact
    for pair in contact.geom:
        names = [model.body(model.geom_bodyid[geom]).name for geom in pair]
        hands = [name.startswith(_HAND) for name in names]
        if any(hands) and not all(
            own or name.startswith(_ROBOT) for own, name in zip(hands, names, strict=True)
        ):
            return True
    return False
