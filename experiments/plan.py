"""What follows from an experiment's seed: each robot's plan, and each attempt's rollout.

Everything here is a pure function of the experiment and of the attempt's own identity, never of what
happened before: arms of a matrix, and runs that were interrupted, meet the same initial states.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from dayshift.experiments.config import Experiment, FaultConfig
from dayshift.planner.jobs import Attempt, Job, JobStep, Shift
from dayshift.sim.tasks import find_task, list_tasks
from dayshift.sim.types import Fault, RolloutSpec
from dayshift.types import StepKey


def robot_name(number: int) -> str:
    """Name of the robot with this number; the first is 1."""
    return f"robot-{number}"


def build_plan(experiment: Experiment, robot: int) -> tuple[Shift, ...]:
    """The shifts of a robot, with LIBERO's own sentences. Raises UnknownTaskError."""
    plan = experiment.plan
    if plan.shifts is not None:
        return _number(plan.shifts)
    names = plan.tasks or [task.sentence for task in list_tasks()]
    tasks = _Deck(names, random.Random(f"plan/{experiment.seed}/{robot}"))
    return _number([[[tasks.draw() for _ in range(num_steps)] for num_steps in jobs] for jobs in plan.shape])


class _Deck:
    """Draws each task equally often, in random order."""

    def __init__(self, tasks: Sequence[str], rng: random.Random) -> None:
        self._tasks = list(tasks)
        self._rng = rng
        self._left: list[str] = []

    def draw(self) -> str:
        if not self._left:
            self._left = self._rng.sample(self._tasks, len(self._tasks))
        return self._left.pop()


def _number(tasks: Sequence[Sequence[Sequence[str]]]) -> tuple[Shift, ...]:
    return tuple(
        Shift(
            s,
            tuple(
                Job(
                    j,
                    tuple(
                        JobStep(StepKey(s, j, k), find_task(task).sentence) for k, task in enumerate(job, 1)
                    ),
                )
                for j, job in enumerate(jobs, 1)
            ),
        )
        for s, jobs in enumerate(tasks, 1)
    )


def rollout_spec(experiment: Experiment, robot: int, attempt: Attempt) -> RolloutSpec:
    """The rollout of an attempt: the next attempt at the same step starts from the next initial state."""
    sim, key = experiment.sim, attempt.step.key
    index = attempt.number - 1 + (experiment.rules.max_attempts if attempt.is_review else 0)
    first = _stable_number("init", experiment.seed, robot, key)
    return RolloutSpec(
        task=attempt.step.task,
        init_state_id=(first + index) % sim.num_init_states,
        seed=_stable_number("fixtures", experiment.seed, robot, key, index) % 2**31,
        max_steps=sim.max_steps,
        instruction=attempt.instruction,
        fault=choose_fault(experiment.faults, experiment.seed, robot, attempt),
        camera_hz=sim.camera_hz,
        image_size=sim.image_size,
    )


def _stable_number(*parts: object) -> int:
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def choose_fault(faults: Sequence[FaultConfig], seed: int, robot: int, attempt: Attempt) -> Fault | None:
    """The first fault that fits the attempt and hits its step."""
    for index, fault in enumerate(faults):
        draw = _stable_number("fault", seed, index, robot, attempt.step.key) / 2**64
        if draw < fault.probability and _fits(fault, robot, attempt):
            return _physics(fault)
    return None


def _fits(fault: FaultConfig, robot: int, attempt: Attempt) -> bool:
    key = attempt.step.key
    return (
        fault.robot in (None, robot)
        and (fault.task is None or find_task(fault.task).sentence == attempt.step.task)
        and fault.shift in (None, key.shift)
        and fault.job in (None, key.job)
        and fault.step in (None, key.step)
        and (fault.attempts is None or attempt.number in fault.attempts)
        and (fault.in_reviews or not attempt.is_review)
    )


def _physics(fault: FaultConfig) -> Fault:
    chosen = fault.model_dump(include={"kind", "at_step", "num_steps", "strength"}, exclude_none=True)
    return Fault(**chosen)
