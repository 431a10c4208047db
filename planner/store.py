"""What must be committed before the next step is taken, and a store in memory.

`experiments` injects a `Store` on a database. The loops call it before they publish an event or go
on, so that a process killed at any point resumes from what is stored and repeats no finished step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from dayshift.planner.jobs import ReviewAnswer, Shift
from dayshift.planner.records import (
    AttemptRecord,
    Exchange,
    RobotRecords,
    ShiftHours,
    StepRecord,
    StepState,
)
from dayshift.types import StepKey


class Store(Protocol):
    """Durable state of the robots' operations.

    Every method that writes is one transaction and is durable when it returns. Writing a record whose
    identity (see `planner.records`) is there already replaces it. Called from one thread per robot.
    A failed write raises; the operation then stops there and can be resumed.
    """

    def load(self, robot: str) -> RobotRecords:
        """All records of a robot; empty ones when nothing is stored."""
        ...

    def save_plan(self, robot: str, shifts: Sequence[Shift]) -> None:
        """Store the plan, with a PENDING `StepRecord` (is_review False) for each job step."""
        ...

    def save_step(self, record: StepRecord) -> None: ...

    def save_hours(self, hours: ShiftHours) -> None: ...

    def add_exchange(self, exchange: Exchange) -> None: ...

    def add_attempt(self, record: AttemptRecord) -> None: ...

    def save_answer(self, robot: str, answer: ReviewAnswer) -> None: ...


class InMemoryStore:
    """A `Store` that lasts as long as its process: for tests and for runs that nobody resumes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._plans: dict[str, tuple[Shift, ...]] = {}
        self._steps: dict[tuple[str, StepKey, bool], StepRecord] = {}
        self._hours: dict[tuple[str, int, bool], ShiftHours] = {}
        self._exchanges: dict[tuple[str, int], Exchange] = {}
        self._attempts: dict[str, AttemptRecord] = {}
        self._answers: dict[tuple[str, int], ReviewAnswer] = {}

    def load(self, robot: str) -> RobotRecords:
        with self._lock:
            return RobotRecords(
                robot=robot,
                shifts=self._plans.get(robot, ()),
                steps=tuple(r for r in self._steps.values() if r.robot == robot),
                hours=tuple(h for h in self._hours.values() if h.robot == robot),
                exchanges=tuple(e for e in self._exchanges.values() if e.robot == robot),
                attempts=tuple(a for a in self._attempts.values() if a.attempt.robot == robot),
                answers=tuple(a for (owner, _), a in self._answers.items() if owner == robot),
            )

    def save_plan(self, robot: str, shifts: Sequence[Shift]) -> None:
        with self._lock:
            self._plans[robot] = tuple(shifts)
            for step in (step for shift in shifts for step in shift.steps):
                self._steps[robot, step.key, False] = StepRecord(
                    robot=robot, step=step, is_review=False, state=StepState.PENDING
                )

    def save_step(self, record: StepRecord) -> None:
        with self._lock:
            self._steps[record.robot, record.step.key, record.is_review] = record

    def save_hours(self, hours: ShiftHours) -> None:
        with self._lock:
            self._hours[hours.robot, hours.shift, hours.is_review] = hours

    def add_exchange(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges[exchange.robot, exchange.index] = exchange

    def add_attempt(self, record: AttemptRecord) -> None:
        with self._lock:
            self._attempts[record.attempt.attempt_id] = record

    def save_answer(self, robot: str, answer: ReviewAnswer) -> None:
        with self._lock:
            self._answers[robot, answer.shift] = answer
