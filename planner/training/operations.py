"""Synthetic operations: every turn that a planner sees, with the reply it should give.

An operation is shifts of jobs of job steps, then one review per shift, each followed by the redo of
what was given up, exactly as `planner.protocol` words it. No session memory here: `memory` decides
which of these turns are visible at each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from random import Random

from dayshift.planner import protocol
from dayshift.planner.jobs import JobStep
from dayshift.planner.training.wording import (
    Wording,
    any_sentence,
    invented_word,
    libero_sentence,
)
from dayshift.types import StepKey


class TurnKind(Enum):
    """What a turn's reply is, which decides whether it is taught."""

    ACTION = "action"
    REVIEW = "review"
    SPOILED = "spoiled"  # an unusable reply, answered by a repair message: never taught


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and its reply.

    The reply is determined by the turns from index `since` on (the message that began the job step,
    or the question) and, in a review, by the hours of `shift` (0: no review).
    """

    user: str
    reply: str
    kind: TurnKind
    since: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class Operation:
    """All turns in order. A turn's index is its time, so `hours` are half-open index ranges."""

    turns: tuple[Turn, ...]
    hours: dict[int, tuple[int, int]]  # shift -> [first turn, end)
    given_up: dict[int, tuple[JobStep, ...]]  # shift -> steps in order


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationShape:
    """The size of an operation and how its attempts go."""

    num_shifts: int = 3
    num_jobs: int = 2
    num_steps: int = 2
    first_shift: int = 1
    give_up_rate: float | None = None  # None: drawn per shift
    repair_rate: float = 0.0  # share of replies that are spoiled and repaired
    infra_rate: float = 0.0  # share of given-up steps whose last failure is told early (infra)
    early_review_rate: float = 0.0  # chance, after each shift, of reviewing a finished shift already
    num_reviews: int | None = None  # only that many shifts are reviewed, the oldest; None: all
    is_review_order_varied: bool = False
    is_size_varied: bool = False  # jobs and steps per job vary between 1 and the given numbers
    wording: Wording = any_sentence


def random_shape(rng: Random, *, max_turns: int, max_shift_turns: int = 90) -> OperationShape:
    """A shape for training: about `max_turns` turns before its reviews, `max_shift_turns` in a shift."""
    while True:
        num_jobs, num_steps = rng.choice((1, 1, 2, 2, 3, 4, 9)), rng.choice((1, 2, 2, 3, 3, 4, 5, 9))
        turns_per_shift = 3 * num_jobs * num_steps
        if turns_per_shift <= max(6, min(max_turns, max_shift_turns)):
            break
    num_shifts = max(1, min(48, round(max_turns / turns_per_shift * rng.uniform(0.5, 1.2))))
    is_first = rng.random() < 0.6
    return OperationShape(
        num_shifts=num_shifts,
        num_jobs=num_jobs,
        num_steps=num_steps,
        first_shift=1 if is_first else rng.randint(1, 99 - num_shifts),
        repair_rate=rng.choice((0.0, 0.0, 0.03)),
        infra_rate=rng.choice((0.0, 0.0, 0.1)),
        early_review_rate=rng.choice((0.0, 0.0, 0.5)),
        is_review_order_varied=True,
        is_size_varied=rng.random() < 0.4,
        wording=libero_sentence if rng.random() < 0.35 else any_sentence,
    )


def make_operation(rng: Random, shape: OperationShape) -> Operation:
    """Play one operation with a planner that makes no mistake (but for repaired replies)."""
    return _Player(rng, shape).play()


class _Player:
    def __init__(self, rng: Random, shape: OperationShape) -> None:
        self.rng, self.shape = rng, shape
        self.turns: list[Turn] = []
        self.hours: dict[int, tuple[int, int]] = {}
        self.given_up: dict[int, tuple[JobStep, ...]] = {}
        self.max_attempts = rng.choice((1, 2, 2, 2, 3))

    def play(self) -> Operation:
        unreviewed: list[int] = []
        first = self.shape.first_shift
        for shift in range(first, first + self.shape.num_shifts):
            self.work(shift)
            unreviewed.append(shift)
            if self.rng.random() < self.shape.early_review_rate:
                self.review(unreviewed.pop(self.rng.randrange(len(unreviewed))))
        if self.shape.is_review_order_varied and self.rng.random() < 0.3:
            self.rng.shuffle(unreviewed)
        for shift in unreviewed[: self.shape.num_reviews]:
            self.review(shift)
        return Operation(tuple(self.turns), self.hours, self.given_up)

    def work(self, shift: int) -> None:
        rng, start = self.rng, len(self.turns)
        rate = self.shape.give_up_rate
        if rate is None:
            rate = rng.choice((0.05, 0.25, 0.5, 0.8))
        pool = [self.shape.wording(rng) for _ in range(rng.choice((1, 2, 4, 8, 16)))]
        given_up: list[JobStep] = []
        for job in range(1, self.size(self.shape.num_jobs) + 1):
            for step in range(1, self.size(self.shape.num_steps) + 1):
                job_step = JobStep(StepKey(shift, job, step), rng.choice(pool))
                is_done = rng.random() >= rate
                self.attempt(protocol.step_message(job_step), job_step, is_done)
                if not is_done:
                    given_up.append(job_step)
        self.hours[shift] = (start, len(self.turns))
        self.given_up[shift] = tuple(given_up)

    def size(self, number: int) -> int:
        return self.rng.randint(1, number) if self.shape.is_size_varied else number

    def review(self, shift: int) -> None:
        steps = self.given_up[shift]
        answer = protocol.Redo(tuple((s.key.job, s.key.step, s.task) for s in steps))
        self.say(protocol.review_message(shift), answer, len(self.turns), shift=shift)
        rate = self.rng.choice((0.0, 0.3, 0.7))
        for job_step in steps:
            self.attempt(protocol.redo_message(job_step), job_step, self.rng.random() >= rate)

    def attempt(self, message: str, job_step: JobStep, is_done: bool) -> None:
        """All attempts of one job step, from the message that begins it to next or give_up."""
        execute, limit, since = protocol.Execute(job_step.task), self.max_attempts, len(self.turns)
        num_failures = self.rng.choice((0, 0, self.rng.randrange(limit))) if is_done else limit
        self.say(message, execute, since, job_step)
        first = limit if not is_done and self.rng.random() < self.shape.infra_rate else 1
        for number in range(first, num_failures + 1):
            is_last = number == limit
            reply = protocol.GiveUp(job_step.key, job_step.task) if is_last else execute
            self.say(protocol.failed_message(number, limit), reply, since, job_step)
        if is_done:
            self.say(protocol.done_message(), protocol.Next(), since, job_step)

    def say(
        self,
        message: str,
        reply: protocol.Command | protocol.Redo,
        since: int,
        job_step: JobStep | None = None,
        shift: int = 0,
    ) -> None:
        """Append a turn; now and then its reply is spoiled first, and repaired in a turn of its own."""
        kind = TurnKind.REVIEW if isinstance(reply, protocol.Redo) else TurnKind.ACTION
        text = protocol.format_reply(reply)
        if self.rng.random() < self.shape.repair_rate:
            self.turns.append(Turn(message, _spoil(self.rng, text), TurnKind.SPOILED, since, shift))
            message = protocol.repair_message(_problem(self.rng, job_step))
        self.turns.append(Turn(message, text, kind, since, shift))


def _spoil(rng: Random, text: str) -> str:
    if rng.random() < 0.5:
        return text[: rng.randrange(1, len(text))]  # cut off
    return protocol.format_reply(rng.choice((protocol.Next(), protocol.Execute(any_sentence(rng)))))


def _problem(rng: Random, job_step: JobStep | None) -> str:
    """What a repair message may say: as `planner.rules` and `planner.protocol` word it, and others."""
    problems = [
        "it was cut off",
        "it ended early",
        "the step has not been tried yet",
        "the step is not done",
        "the step is done",
        "no attempt is left",
        "not valid JSON (Unterminated string starting at)",
        "not valid JSON (Expecting value)",
        "expected a JSON object",
        "expected an execute, next or give_up command",
        "expected a redo list",
        "expected job, step and task in every redo item",
        " ".join(invented_word(rng) for _ in range(rng.randint(2, 6))),
    ]
    if job_step is not None:
        k = job_step.key
        problems += 2 * [
            f"the step is: {job_step.task}",
            f"the step is shift {k.shift}, job {k.job}, step {k.step}",
        ]
    return rng.choice(problems)
