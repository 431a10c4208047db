"""The lowest layer: the run clock, step keys, outcomes and events. Standard library only.

Every package may import this module; it imports none of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, Protocol


class Outcome(StrEnum):
    """How an attempt, or a job step as a whole, ended."""

    DONE = "done"
    FAILED = "failed"  # an attempt whose success test never passed within its control steps
    GIVEN_UP = "given_up"  # a job step whose tries are used up; it waits for its shift's review
    INFRA = "infra"  # simulator or server broke: not the robot's fault, tried again


class GiveUpReason(StrEnum):
    """Why a job step was given up."""

    ATTEMPTS = "attempts"  # every allowed attempt failed
    PLANNER = "planner"  # the planner gave no usable command, or chose to give up early
    INFRA = "infra"  # simulator or server broke more often than allowed


@dataclass(frozen=True, slots=True, order=True)
class StepKey:
    """Identity of a job step. Sentences repeat, so a sentence never identifies a step.

    All three numbers start at 1, as they are written in the planner's prompts.
    """

    shift: int
    job: int
    step: int

    def __str__(self) -> str:
        return f"{self.shift}.{self.job}.{self.step}"


@dataclass(slots=True)
class RunClock:
    """Seconds since the run began, continued over a resume.

    `offset_s` is the run time already spent before this process started (0 for a new run).
    """

    offset_s: float = 0.0
    _started_at: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        """Seconds on the run clock."""
        return self.offset_s + time.monotonic() - self._started_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a run, at `t` seconds on the run clock, to one robot.

    Each kind of event is a subclass of its own, defined beside the code that publishes it, with
    a `kind` for logs and the wire.
    """

    kind: ClassVar[str] = "event"

    t: float
    robot: str


class Publish(Protocol):
    """Where loops publish events. Subscribers must not raise and must not block for long."""

    def __call__(self, event: Event, /) -> None: ...


def fan_out(*subscribers: Callable[[Event], None]) -> Publish:
    """One `Publish` that hands each event to every subscriber, in the given order."""

    def publish(event: Event, /) -> None:
        for subscriber in subscribers:
            subscriber(event)

    return publish


class DayshiftError(Exception):
    """A mistake or a condition that is explained to the user in one line, without a traceback."""
