"""Scores of an operation, computed from its records alone, never from what the planner claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dayshift.planner.records import RobotRecords, StepRecord, StepState
from dayshift.types import Outcome, StepKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Sums over all robots. Ratios are 0 when there is nothing to divide by, unless said otherwise."""

    steps_total: int  # job steps in the plans
    steps_completed: int  # done in their own shift; redone steps are not among them
    given_up: int  # given up in their own shift
    retried: int  # given-up steps that a review tried again, to the end
    redone: int  # given-up steps that succeeded when tried again
    false_redo: int  # steps that a review tried again although they were never given up

    reviews: int  # reviews that were answered, validly or not
    review_answers_correct: int  # the listed set equals the set given up in that shift
    recall_precision: float  # listed steps that were given up / listed; 1 when none was listed
    recall_recall: float  # given-up steps of answered reviews that were listed; 1 when there was none
    recall_f1: float

    attempts: int  # ended done or failed
    infra_attempts: int  # simulator or server broke

    planner_calls: int  # messages that were answered
    planner_failures: int  # messages that stayed without a reply
    refused_replies: int  # cut off, or not fitting the situation
    prompt_tokens_computed_per_call: float  # computed and recomputed ones
    recalled_tokens: int
    latency_s_per_call: float


def compute_scores(robots: Iterable[RobotRecords]) -> Scores:
    """Score the records of one or more robots of a run, finished or not."""
    robots = tuple(robots)
    shift_steps = [s for robot in robots for s in robot.steps if not s.is_review]
    given_up = {_identity(s) for s in shift_steps if s.state is StepState.GIVEN_UP}
    redos = [s for robot in robots for s in robot.steps if s.is_review]
    retries = [s for s in redos if s.state.is_final and _identity(s) in given_up]
    reviews = [
        (
            answer.is_valid,
            set(answer.steps),
            {key for name, key in given_up if name == robot.robot and key.shift == answer.shift},
        )
        for robot in robots
        for answer in robot.answers
    ]
    num_hits = sum(len(listed & expected) for _, listed, expected in reviews)
    num_listed = sum(len(listed) for _, listed, _ in reviews)
    num_expected = sum(len(expected) for _, _, expected in reviews)
    attempts = [record.result.outcome for robot in robots for record in robot.attempts]
    exchanges = [exchange for robot in robots for exchange in robot.exchanges]
    calls = [exchange for exchange in exchanges if not exchange.error]
    return Scores(
        steps_total=len(shift_steps),
        steps_completed=sum(s.state is StepState.DONE for s in shift_steps),
        given_up=len(given_up),
        retried=len(retries),
        redone=sum(s.state is StepState.DONE for s in retries),
        false_redo=sum(_identity(s) not in given_up for s in redos),
        reviews=len(reviews),
        review_answers_correct=sum(valid and listed == expected for valid, listed, expected in reviews),
        recall_precision=_ratio(num_hits, num_listed, default=1.0),
        recall_recall=_ratio(num_hits, num_expected, default=1.0),
        recall_f1=_ratio(2 * num_hits, num_listed + num_expected, default=1.0),
        attempts=sum(outcome is not Outcome.INFRA for outcome in attempts),
        infra_attempts=sum(outcome is Outcome.INFRA for outcome in attempts),
        planner_calls=len(calls),
        planner_failures=len(exchanges) - len(calls),
        refused_replies=sum(bool(call.problem) for call in calls),
        prompt_tokens_computed_per_call=_ratio(
            sum(call.ledger.computed + call.ledger.recomputed for call in calls), len(calls)
        ),
        recalled_tokens=sum(call.ledger.recalled for call in calls),
        latency_s_per_call=_ratio(sum(call.latency_s for call in calls), len(calls)),
    )


def _identity(record: StepRecord) -> tuple[str, StepKey]:
    return record.robot, record.step.key


def _ratio(numerator: float, denominator: float, *, default: float = 0.0) -> float:
    return numerator / denominator if denominator else default
