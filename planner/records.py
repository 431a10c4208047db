"""What is recorded of an operation: plan states, exchanges, attempts, hours, review answers.

These records are durable (see `planner.store`): a killed run resumes from them, and the scores are
computed from them alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dayshift.engine.api import FinishReason, RecallRange, TokenLedger
from dayshift.planner.jobs import Attempt, AttemptResult, JobStep, ReviewAnswer, Shift
from dayshift.types import Event, GiveUpReason, StepKey


class StepState(StrEnum):
    """Where a job step is, in its shift or in the review that redoes it."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    GIVEN_UP = "given_up"
    CANCELLED = "cancelled"  # the user cancelled the operation before the step was over

    @property
    def is_final(self) -> bool:
        """True when the step will not be worked on any more."""
        return self not in (StepState.PENDING, StepState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """State of a job step. Identity: (robot, step.key, is_review).

    The plan's own record has `is_review` False; a redo in the review has one of its own.
    `num_attempts` counts attempts that ended done or failed, `num_infra_attempts` those that broke.
    """

    robot: str
    step: JobStep
    is_review: bool
    state: StepState
    num_attempts: int = 0
    num_infra_attempts: int = 0
    reason: GiveUpReason | None = None  # set when state is GIVEN_UP


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftHours:
    """When a shift, or its review, ran: [start_s, end_s) on the run clock.

    Identity: (robot, shift, is_review). `end_s` is None while it runs.
    """

    robot: str
    shift: int
    is_review: bool
    start_s: float
    end_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One message to the planner and what came back. Identity: (robot, index).

    `index` counts the robot's exchanges from 1. `step` is None for a review question and its repair.
    `num_attempts` is how many attempts of the step had ended done or failed when it was sent.
    `problem` says why the reply was refused ("" for a usable one). `error` says why there is no
    reply at all, after `num_retries` repeated calls ("" when there is one); such an exchange is not
    part of the conversation. `latency_s` is the time of the last call.
    """

    robot: str
    index: int
    shift: int
    is_review: bool
    step: StepKey | None
    num_attempts: int
    is_repair: bool
    at: float  # seconds on the run clock; also the turn's time in the planner's session
    message: str
    reply: str
    finish_reason: FinishReason
    ledger: TokenLedger
    recall_range: RecallRange | None = None  # asked for; the memory arm decides what is done with it
    recalled_turns: tuple[int, ...] = ()
    present_turns: tuple[int, ...] = ()
    not_fitting_turns: tuple[int, ...] = ()
    latency_s: float = 0.0
    num_retries: int = 0
    problem: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """An attempt that has ended. Identity: attempt.attempt_id. Times on the run clock."""

    attempt: Attempt
    result: AttemptResult
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RobotRecords:
    """Everything recorded of one robot's operation; exchanges and attempts in recorded order.

    `shifts` is the plan, empty when none was saved yet.
    """

    robot: str
    shifts: tuple[Shift, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    hours: tuple[ShiftHours, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    attempts: tuple[AttemptRecord, ...] = ()
    answers: tuple[ReviewAnswer, ...] = ()

    @property
    def last_s(self) -> float:
        """The latest recorded time on the run clock; a resumed run's clock starts no earlier."""
        times = [hours.end_s or hours.start_s for hours in self.hours]
        times += [exchange.at for exchange in self.exchanges]
        times += [attempt.end_s for attempt in self.attempts]
        return max(times, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerExchanged(Event):
    """The planner was asked, and answered or not."""

    kind = "planner_exchanged"
    exchange: Exchange
