"""Which episodes an evaluation has. A pure function of its settings, so that two policies meet the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from dayshift.policy.remote.chunk_queue import Blending
from dayshift.policy.remote.policy import Pace, RemoteOptions
from dayshift.sim.tasks import find_task, list_tasks
from dayshift.sim.types import RolloutSpec

_SEEDS_PER_SEED = 1000  # more than a task has initial states


Videos = Literal["none", "failures", "all"]  # which episodes are filmed


class Instructions(StrEnum):
    """What the policy is told."""

    OWN = "own"  # the task's sentence
    SHUFFLED = "shuffled"  # another task's of the suite: a policy that listens must fail


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """Settings of an evaluation. Trial i starts from initial state `first_init_state + i`.

    With `num_init_states` the trials behind so many begin again at the first of them, with the next seed:
    fixtures elsewhere, other noise. With `starts`, pairs of a task and an initial state, these are met
    instead, each `num_trials` times.

    `tasks` are LIBERO's numbers in the suite; `n_action_steps` has an arm for each value (None: the
    policy's). `blending`, `pace` and `n_ahead_steps` are as in `policy.remote`; `replay_of` is the folder of
    the evaluation whose actions the policy `replay` plays.
    """

    policy: str
    suite: str
    tasks: tuple[int, ...]
    num_trials: int
    first_init_state: int = 0
    num_init_states: int | None = None
    starts: tuple[tuple[int, int], ...] | None = None
    seed: int = 0
    max_steps: int
    image_size: int = 256
    instructions: Instructions = Instructions.OWN
    n_action_steps: tuple[int | None, ...] = (None,)
    blending: Blending = Blending.REPLACE
    pace: Pace = Pace.WAIT
    n_ahead_steps: int = 0
    replay_of: str | None = None

    def init_states_of(self, task: int) -> Sequence[int]:
        """That the trials of a task start from, one after the other."""
        if self.starts is not None:
            return tuple(state for other, state in self.starts if other == task)
        num_states = min(self.num_trials, self.num_init_states or self.num_trials)
        return range(self.first_init_state, self.first_init_state + num_states)

    def num_trials_of(self, task: int) -> int:
        """Episodes of a task in each arm."""
        return self.num_trials * (1 if self.starts is None else len(self.init_states_of(task)))

    def arms(self) -> tuple[RemoteOptions, ...]:
        """How a served policy is followed in each arm."""
        return tuple(self.remote_options(number) for number in self.n_action_steps)

    def remote_options(self, n_action_steps: int | None) -> RemoteOptions:
        """How a served policy is followed in one arm."""
        return RemoteOptions(
            n_action_steps=n_action_steps,
            n_ahead_steps=self.n_ahead_steps,
            blending=self.blending,
            pace=self.pace,
        )

    def episodes(self) -> tuple[Episode, ...]:
        """All episodes, arm by arm; within an arm trial by trial, so that early results cover all tasks."""
        counts = {task: self.num_trials_of(task) for task in self.tasks}
        return tuple(
            Episode(task=task, trial=trial, n_action_steps=steps)
            for steps in self.n_action_steps
            for trial in range(max(counts.values(), default=0))
            for task in self.tasks
            if trial < counts[task]
        )

    def rollout_spec(self, episode: Episode) -> RolloutSpec:
        """The rollout of an episode."""
        tasks = list_tasks(self.suite)
        task = tasks[episode.task]
        told = task
        if self.instructions is Instructions.SHUFFLED:
            told = tasks[(episode.task + 1) % len(tasks)]
        init_states = self.init_states_of(episode.task)
        num_repeats, number = divmod(episode.trial, len(init_states))
        init_state_id = init_states[number]
        return RolloutSpec(
            task=task.name_in_suite,
            init_state_id=init_state_id,
            seed=(self.seed + num_repeats) * _SEEDS_PER_SEED + init_state_id,
            max_steps=self.max_steps,
            instruction=told.sentence,
            image_size=self.image_size,
        )


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Episode:
    """One attempt of an evaluation."""

    task: int
    trial: int
    n_action_steps: int | None

    def __str__(self) -> str:
        steps = "" if self.n_action_steps is None else f"-n{self.n_action_steps}"
        return f"task{self.task}-trial{self.trial}{steps}"


def task_numbers(suite: str, tasks: str | None) -> tuple[int, ...]:
    """Numbers of tasks given as `0,3,turn on the stove`; all of the suite without any.

    Raises UnknownTaskError.
    """
    if tasks is None:
        return tuple(task.index for task in list_tasks(suite))
    names = (name.strip() for name in tasks.split(","))
    return tuple(dict.fromkeys(find_task(f"{suite}/{name}").index for name in names if name))
