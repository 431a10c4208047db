"""What is known of a run while it goes on: the state behind the progress display."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dayshift.planner.jobs import (
    Attempt,
    AttemptEnded,
    AttemptStarted,
    ReviewEnded,
    Shift,
    ShiftStarted,
    StepEnded,
)
from dayshift.planner.records import PlannerExchanged, RobotRecords
from dayshift.types import Event, Outcome, StepKey


@dataclass(slots=True)
class RobotBoard:
    """One robot: its plan, how each step ended, and what it does now."""

    shifts: tuple[Shift, ...]
    outcomes: dict[StepKey, Outcome] = field(default_factory=dict)
    redo_outcomes: dict[StepKey, Outcome] = field(default_factory=dict)
    num_reviews: int = 0
    shift: int = 0
    is_review: bool = False
    attempt: Attempt | None = None

    @property
    def num_steps(self) -> int:
        return sum(len(shift.steps) for shift in self.shifts)

    @property
    def num_to_redo(self) -> int:
        """Given-up steps that no review has tried again yet."""
        given_up = {key for key, outcome in self.outcomes.items() if outcome is Outcome.GIVEN_UP}
        return len(given_up - self.redo_outcomes.keys()) if self.num_reviews < len(self.shifts) else 0


class Board:
    """Takes in a run's events. Read and written under the display's lock."""

    def __init__(self, plans: Mapping[str, Sequence[Shift]]) -> None:
        self.robots = {robot: RobotBoard(tuple(shifts)) for robot, shifts in plans.items()}
        self.num_attempts = 0
        self.num_calls = 0
        self._started_at = time.monotonic()
        self._num_steps_before = 0

    def take_up(self, records: RobotRecords) -> None:
        """What an earlier process of the same run has recorded."""
        robot = self.robots[records.robot]
        for step in records.steps:
            if step.state.is_final:
                outcomes = robot.redo_outcomes if step.is_review else robot.outcomes
                outcomes[step.step.key] = Outcome(step.state.value)
                self._num_steps_before += 1
        robot.num_reviews = sum(hours.is_review and hours.end_s is not None for hours in records.hours)
        self.num_attempts += len(records.attempts)
        self.num_calls += len(records.exchanges)

    def update(self, event: Event) -> None:
        """Something happened."""
        robot = self.robots[event.robot]
        match event:
            case ShiftStarted():
                robot.shift, robot.is_review = event.shift, event.is_review
            case AttemptStarted():
                robot.shift, robot.is_review = event.attempt.step.key.shift, event.attempt.is_review
                robot.attempt = event.attempt
            case AttemptEnded():
                robot.attempt = None
                self.num_attempts += 1
            case StepEnded(result=result):
                outcomes = robot.redo_outcomes if result.is_review else robot.outcomes
                outcomes[result.step.key] = result.outcome
            case ReviewEnded():
                robot.num_reviews += 1
            case PlannerExchanged():
                self.num_calls += 1

    @property
    def num_steps(self) -> int:
        return sum(robot.num_steps for robot in self.robots.values())

    @property
    def num_steps_over(self) -> int:
        return sum(len(robot.outcomes) for robot in self.robots.values())

    @property
    def elapsed_s(self) -> float:
        """Since this process took the run up."""
        return time.monotonic() - self._started_at

    @property
    def remaining_s(self) -> float | None:
        """Estimate from the mean time of a step so far; None before the first one is over."""
        num_over = self.num_steps_over + sum(len(robot.redo_outcomes) for robot in self.robots.values())
        num_here = num_over - self._num_steps_before
        if num_here == 0:
            return None
        num_left = self.num_steps - self.num_steps_over
        num_left += sum(robot.num_to_redo for robot in self.robots.values())
        return self.elapsed_s / num_here * num_left
