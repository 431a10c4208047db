"""The planner's own words, defined once.

A **shift** is a list of **jobs**; a job is a list of **job steps**; a job step is one instruction to
the robot (a LIBERO sentence). A try at a job step is an **attempt**. An attempt ends done, failed or
infra (simulator or server broke: not the robot's fault, tried again). A job step whose attempts are
used up is **given up**. After the last shift each shift is **reviewed**: the planner names, from
memory, the steps given up in that shift, and they are tried again (**redo**).
"""

from __future__ import annotations

from dataclasses import dataclass

from dayshift.types import Event, GiveUpReason, Outcome, StepKey


@dataclass(frozen=True, slots=True)
class JobStep:
    """One instruction. `task` is the sentence as the planner and the policy are given it."""

    key: StepKey
    task: str


@dataclass(frozen=True, slots=True)
class Job:
    """Steps done in order. A given-up step does not stop the ones after it."""

    number: int
    steps: tuple[JobStep, ...]


@dataclass(frozen=True, slots=True)
class Shift:
    """Jobs done in order by one robot."""

    number: int
    jobs: tuple[Job, ...]

    @property
    def steps(self) -> tuple[JobStep, ...]:
        """All job steps, in order."""
        return tuple(step for job in self.jobs for step in job.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A try at a job step. Counting starts at 1, anew in a review; `infra` attempts count apart."""

    attempt_id: str  # unique in the run: "{robot}-{shift}.{job}.{step}-{w|r}{number}[i{k}]"
    robot: str
    step: JobStep
    number: int
    is_review: bool
    instruction: str  # the sentence the planner's command carried


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """How an attempt ended, as the simulator says."""

    outcome: Outcome  # DONE, FAILED or INFRA
    num_control_steps: int
    detail: str = ""  # for INFRA: what broke, one line


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """How a job step ended in its shift, or in a review."""

    step: JobStep
    is_review: bool
    outcome: Outcome  # DONE or GIVEN_UP
    num_attempts: int
    reason: GiveUpReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """What the planner answered in the review of a shift; `steps` as it listed them.

    A step that is not in the plan is refused (not tried again) and kept in `refused`. A step listed
    with a sentence that is not the plan's is tried with the plan's own, and kept in `mismatched`.
    """

    shift: int
    steps: tuple[StepKey, ...]
    is_valid: bool  # False: no usable answer, even after the repair
    refused: tuple[StepKey, ...] = ()
    mismatched: tuple[StepKey, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftReport:
    """A finished shift: its hours on the run clock, and each step's result in order."""

    robot: str
    shift: int
    start_s: float
    end_s: float
    results: tuple[StepResult, ...]


# --- events: what the loops publish; recorder, page and progress display subscribe -------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftStarted(Event):
    """A shift, or its review, began."""

    kind = "shift_started"
    shift: int
    is_review: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftEnded(Event):
    """All steps of a shift are over."""

    kind = "shift_ended"
    report: ShiftReport


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted(Event):
    """The robot begins to try."""

    kind = "attempt_started"
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnded(Event):
    """The simulator has said how the attempt ended."""

    kind = "attempt_ended"
    attempt: Attempt
    result: AttemptResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded(Event):
    """A job step, or its redo in a review, is over."""

    kind = "step_ended"
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewEnded(Event):
    """The review has been answered and every listed step tried again."""

    kind = "review_ended"
    answer: ReviewAnswer
