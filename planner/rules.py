"""Retry and give-up rules: how often a job step is tried, and which command fits which situation.

Counters start at zero for each job step, and again for its redo in a review; nothing resets them in
between, so every step ends. All attempts of a step carry its one sentence, so the limit on attempts is
also the limit on the same plan being repeated.

| what happened                                | what follows                                      |
|----------------------------------------------|---------------------------------------------------|
| attempt done                                 | the step is done, whatever the planner says next  |
| attempt failed, attempts left                | the planner is told and asked                     |
| attempt failed, the last one                 | the planner is told; given up (attempts)          |
| attempt broke (infra), retries left          | tried again; the planner is not told              |
| attempt broke (infra), no retry left         | told as the last failure; given up (infra)        |
| give_up although attempts are left           | honoured; given up (planner)                      |
| command that does not fit, or a cut-off reply | one repair with the error told                   |
| ... and the repair's reply is no better      | given up (planner)                                |
| no reply after all retries of the call       | given up (infra)                                  |
| no reply for several questions in a row      | the operation stops and can be resumed            |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dayshift.planner.jobs import AttemptResult, JobStep, StepResult
from dayshift.planner.protocol import (
    Command,
    Execute,
    GiveUp,
    Next,
    ReplyError,
    done_message,
    failed_message,
)
from dayshift.types import DayshiftError, GiveUpReason, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The numbers of the table above. Raises DayshiftError for a number out of range."""

    max_attempts: int = 2  # per step that end done or failed
    max_infra_retries: int = 2  # per step
    max_repairs: int = 1  # per question
    max_command_tokens: int = 96  # a longer reply is cut off; a session's window has room for it
    max_review_tokens: int = 512
    planner_retry_delays_s: tuple[float, ...] = (0.5, 2.0, 8.0)  # one retry of the call after each
    max_planner_outages: int = 3  # unanswered questions in a row that stop the operation

    def __post_init__(self) -> None:
        for name in (
            "max_attempts",
            "max_planner_outages",
            "max_command_tokens",
            "max_review_tokens",
        ):
            if getattr(self, name) < 1:
                raise DayshiftError(f"rules.{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("max_infra_retries", "max_repairs"):
            if getattr(self, name) < 0:
                raise DayshiftError(f"rules.{name} is {getattr(self, name)}: it must not be negative")
        if any(delay_s < 0 for delay_s in self.planner_retry_delays_s):
            raise DayshiftError(
                f"rules.planner_retry_delays_s is {list(self.planner_retry_delays_s)}: "
                "no delay may be negative"
            )


class Situation(StrEnum):
    """Where a job step stands when the planner is asked for the next command."""

    GIVEN = "given"  # not tried yet
    FAILED = "failed"  # the last attempt failed, attempts are left
    EXHAUSTED = "exhausted"  # the last attempt failed or broke, none is left
    DONE = "done"  # an attempt succeeded


class Move(StrEnum):
    """What the loop does with a command that fits."""

    EXECUTE = "execute"
    FINISH = "finish"
    GIVE_UP = "give_up"


# The move of each command in each situation, or why the command does not fit.
MOVES: dict[tuple[Situation, type[Command]], Move | str] = {
    (Situation.GIVEN, Execute): Move.EXECUTE,
    (Situation.GIVEN, Next): "the step has not been tried yet",
    (Situation.GIVEN, GiveUp): Move.GIVE_UP,
    (Situation.FAILED, Execute): Move.EXECUTE,
    (Situation.FAILED, Next): "the step is not done",
    (Situation.FAILED, GiveUp): Move.GIVE_UP,
    (Situation.EXHAUSTED, Execute): "no attempt is left",
    (Situation.EXHAUSTED, Next): "the step is not done",
    (Situation.EXHAUSTED, GiveUp): Move.GIVE_UP,
    (Situation.DONE, Execute): "the step is done",
    (Situation.DONE, Next): Move.FINISH,
    (Situation.DONE, GiveUp): "the step is done",
}


def choose_move(command: Command, situation: Situation, step: JobStep) -> Move:
    """The move that a command stands for.

    Raises ReplyError, which says why in words for the planner, when the command does not fit the
    situation, executes another sentence than the step's, or gives up another step.
    """
    move = MOVES[situation, type(command)]
    if not isinstance(move, Move):
        raise ReplyError(move)
    match command:
        case Execute(task) if not is_same_sentence(task, step.task):
            raise ReplyError(f"the step is: {step.task}")
        case GiveUp(key) if key != step.key:
            k = step.key
            raise ReplyError(f"the step is shift {k.shift}, job {k.job}, step {k.step}")
    return move


def is_same_sentence(first: str, second: str) -> bool:
    """True when two sentences differ at most in case, spacing and a final full stop."""
    return _normalised(first) == _normalised(second)


def _normalised(sentence: str) -> str:
    return " ".join(sentence.rstrip(". ").casefold().split())


@dataclass(slots=True)
class StepProgress:
    """Counts the attempts of one job step, or of its redo, and says where the step stands."""

    step: JobStep
    is_review: bool
    rules: Rules
    situation: Situation = Situation.GIVEN
    num_attempts: int = 0  # ended done or failed
    num_infra_attempts: int = 0
    exhausted_reason: GiveUpReason = field(default=GiveUpReason.ATTEMPTS, init=False)

    def count(self, result: AttemptResult) -> None:
        """Take in how an attempt ended."""
        match result.outcome:
            case Outcome.DONE:
                self.num_attempts += 1
                self.situation = Situation.DONE
            case Outcome.FAILED:
                self.num_attempts += 1
                is_last = self.num_attempts == self.rules.max_attempts
                self.situation = Situation.EXHAUSTED if is_last else Situation.FAILED
            case Outcome.INFRA:
                self.num_infra_attempts += 1
                if self.num_infra_attempts > self.rules.max_infra_retries:
                    self.situation = Situation.EXHAUSTED
                    self.exhausted_reason = GiveUpReason.INFRA
            case outcome:
                raise ValueError(f"an attempt cannot end {outcome}")

    def result_message(self) -> str:
        """What the planner is told after an attempt.

        A step whose infra retries are used up is told as the last failure: the planner has to know
        that it is given up, and the protocol has no word for a broken simulator.
        """
        limit = self.rules.max_attempts
        match self.situation:
            case Situation.DONE:
                return done_message()
            case Situation.EXHAUSTED:
                return failed_message(limit, limit)
            case _:
                return failed_message(self.num_attempts, limit)

    @property
    def give_up_reason(self) -> GiveUpReason:
        """Why the step is given up if the planner gives it up now."""
        is_exhausted = self.situation is Situation.EXHAUSTED
        return self.exhausted_reason if is_exhausted else GiveUpReason.PLANNER

    def end(self, reason: GiveUpReason) -> StepResult:
        """The step's result: given up for this reason, unless the robot has done it."""
        is_done = self.situation is Situation.DONE
        return StepResult(
            step=self.step,
            is_review=self.is_review,
            outcome=Outcome.DONE if is_done else Outcome.GIVEN_UP,
            num_attempts=self.num_attempts,
            reason=None if is_done else reason,
        )
