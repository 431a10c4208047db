"""Scores are a pure function of the records."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.engine.api import FinishReason, TokenLedger
from dayshift.planner.jobs import Attempt, AttemptResult, JobStep, ReviewAnswer
from dayshift.planner.records import AttemptRecord, Exchange, RobotRecords, StepRecord, StepState
from dayshift.planner.scores import Scores, compute_scores
from dayshift.types import Outcome, StepKey

SHIFTS = range(1, 4)
KEYS = [StepKey(shift, 1, step) for shift in SHIFTS for step in range(1, 4)]
EXTRA_KEYS = [*KEYS, *(StepKey(shift, 9, 1) for shift in SHIFTS)]  # not in the plan
patiently = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
UNITS = ("steps_total", "steps_completed", "given_up", "retried", "redone", "false_redo", "reviews")


def step_record(robot, key, is_review, state):
    return StepRecord(robot=robot, step=JobStep(key, "turn on the stove"), is_review=is_review, state=state)


def exchange(robot, index, ledger, error="", problem=""):
    return Exchange(
        robot=robot,
        index=index,
        shift=1,
        is_review=False,
        step=KEYS[0],
        num_attempts=0,
        is_repair=False,
        at=float(index),
        message="",
        reply="",
        finish_reason=FinishReason.STOP,
        ledger=ledger,
        latency_s=2.0,
        error=error,
        problem=problem,
    )


def attempt_record(robot, number, outcome):
    attempt = Attempt(
        attempt_id=f"{robot}-1.1.1-w{number}",
        robot=robot,
        step=JobStep(KEYS[0], "turn on the stove"),
        number=number,
        is_review=False,
        instruction="turn on the stove",
    )
    result = AttemptResult(outcome=outcome, num_control_steps=1)
    return AttemptRecord(attempt=attempt, result=result, start_s=0.0, end_s=1.0)


@st.composite
def robots(draw, name="r0"):
    """Records of an operation that ended anyhow, with any answers and any redo."""
    states = draw(st.lists(st.sampled_from(list(StepState)), min_size=9, max_size=9))
    redone = draw(st.dictionaries(st.sampled_from(KEYS), st.sampled_from(["done", "given_up", "running"])))
    reviewed = draw(st.sets(st.sampled_from(list(SHIFTS))))
    listed = draw(st.lists(st.sampled_from(EXTRA_KEYS)))
    ledgers = draw(
        st.lists(
            st.builds(
                TokenLedger,
                computed=st.integers(0, 200),
                recomputed=st.integers(0, 9),
                recalled=st.integers(0, 99),
            )
        )
    )
    outcomes = draw(st.lists(st.sampled_from([Outcome.DONE, Outcome.FAILED, Outcome.INFRA])))
    return RobotRecords(
        robot=name,
        steps=(
            *(step_record(name, key, False, state) for key, state in zip(KEYS, states, strict=True)),
            *(step_record(name, key, True, StepState(state)) for key, state in redone.items()),
        ),
        answers=tuple(
            ReviewAnswer(
                shift=shift,
                steps=tuple(key for key in listed if key.shift == shift),
                is_valid=draw(st.booleans()),
            )
            for shift in sorted(reviewed)
        ),
        exchanges=tuple(exchange(name, n, ledger) for n, ledger in enumerate(ledgers, start=1)),
        attempts=tuple(attempt_record(name, n, outcome) for n, outcome in enumerate(outcomes, start=1)),
    )


@patiently
@given(records=robots())
def test_scores_count_the_records(records):
    scores = compute_scores([records])
    ends = {(s.step.key, s.is_review): s.state for s in records.steps}
    given_up = {key for key in KEYS if ends[key, False] == "given_up"}
    assert scores.steps_completed == sum(ends[key, False] == "done" for key in KEYS)
    assert scores.given_up == len(given_up)
    assert scores.redone == sum(ends.get((key, True)) == "done" for key in given_up)
    assert scores.retried - scores.redone == sum(ends.get((key, True)) == "given_up" for key in given_up)
    assert scores.false_redo == sum((key, True) in ends for key in set(KEYS) - given_up)
    right = [
        a
        for a in records.answers
        if a.is_valid and set(a.steps) == {k for k in given_up if k.shift == a.shift}
    ]
    assert scores.review_answers_correct == len(right)
    assert scores.attempts + scores.infra_attempts == len(records.attempts)


@patiently
@given(first=robots("r0"), second=robots("r1"))
def test_robots_add_up(first, second):
    both, alone = compute_scores([first, second]), [compute_scores([first]), compute_scores([second])]
    counts = [f.name for f in fields(Scores) if f.type == "int"]
    assert set(UNITS) < set(counts)
    for name in counts:
        assert getattr(both, name) == sum(getattr(scores, name) for scores in alone)


@patiently
@given(records=robots())
def test_the_order_of_records_does_not_matter(records):
    turned = replace(
        records,
        **{name: getattr(records, name)[::-1] for name in ("steps", "answers", "exchanges", "attempts")},
    )
    assert compute_scores([turned]) == compute_scores([records])


@patiently
@given(records=robots())
def test_ratios_stay_in_range(records):
    scores = compute_scores([records])
    low, high = sorted((scores.recall_precision, scores.recall_recall))
    assert 0 <= low <= high <= 1
    assert low - 1e-9 <= scores.recall_f1 <= high + 1e-9


def test_recall_of_a_small_example():
    up, done = StepState.GIVEN_UP, StepState.DONE
    records = RobotRecords(
        robot="r0",
        steps=(
            *(step_record("r0", key, False, up) for key in KEYS[:4]),
            *(step_record("r0", key, False, done) for key in KEYS[4:]),
        ),
        answers=(
            ReviewAnswer(shift=1, steps=(KEYS[0], KEYS[1], KEYS[2]), is_valid=True),  # all three
            ReviewAnswer(shift=2, steps=(KEYS[4],), is_valid=True),  # KEYS[3] was given up
            ReviewAnswer(shift=3, steps=(), is_valid=True),
        ),
    )
    scores = compute_scores([records])
    assert (scores.reviews, scores.review_answers_correct) == (3, 2)
    assert (scores.recall_precision, scores.recall_recall, scores.recall_f1) == (0.75, 0.75, 0.75)


def test_tokens_per_call_count_answered_calls_only():
    records = RobotRecords(
        robot="r0",
        exchanges=(
            exchange("r0", 1, TokenLedger(computed=100, recalled=7)),
            exchange("r0", 2, TokenLedger(computed=20, recomputed=30, recalled=5), problem="cut off"),
            exchange("r0", 3, TokenLedger(), error="down"),
        ),
    )
    scores = compute_scores([records])
    assert (scores.planner_calls, scores.planner_failures, scores.refused_replies) == (2, 1, 1)
    assert scores.prompt_tokens_computed_per_call == 75
    assert scores.recalled_tokens == 12
    assert scores.latency_s_per_call == 2.0


def test_nothing_recorded_scores_nothing():
    scores = compute_scores([])
    assert (scores.steps_total, scores.planner_calls, scores.prompt_tokens_computed_per_call) == (0, 0, 0.0)
    assert (scores.recall_precision, scores.recall_recall, scores.recall_f1) == (1.0, 1.0, 1.0)
