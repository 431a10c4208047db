"""Whole operations over random outcomes, against a plain reading of the rules."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.planner.errors import (
    OperationCancelledError,
    OperationStoppedError,
    RecordMismatchError,
)
from dayshift.planner.operation import cancel_operation
from dayshift.planner.records import StepState
from dayshift.planner.rules import Rules
from dayshift.planner.scores import compute_scores
from dayshift.types import GiveUpReason, Outcome

D, F, I = Outcome.DONE, Outcome.FAILED, Outcome.INFRA  # noqa: E741
MAX_OUTCOMES = 5  # enough for the limits below


def expected_end(outcomes, rules):
    """(state, reason, attempts, infra attempts) of a step whose tries end like this, in order."""
    for n in range(1, len(outcomes) + 1):
        failed, broken = outcomes[:n].count(F), outcomes[:n].count(I)
        if outcomes[n - 1] is D:
            return StepState.DONE, None, failed + 1, broken
        if failed == rules.max_attempts:
            return StepState.GIVEN_UP, GiveUpReason.ATTEMPTS, failed, broken
        if broken > rules.max_infra_retries:
            return StepState.GIVEN_UP, GiveUpReason.INFRA, failed, broken
    raise AssertionError("a step did not end")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_outcomes_end_as_the_rules_say(rig, plan, data):
    rules = Rules(
        max_attempts=data.draw(st.integers(1, 3)),
        max_infra_retries=data.draw(st.integers(0, 2)),
    )
    shifts = plan(*data.draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2))))
    tries = st.lists(st.sampled_from([D, F, I]), min_size=MAX_OUTCOMES, max_size=MAX_OUTCOMES)
    planned = {
        (str(step.key), phase): data.draw(tries) for shift in shifts for step in shift.steps for phase in "wr"
    }
    left = {place: list(outcomes) for place, outcomes in planned.items()}

    def outcome_of(attempt_id):
        _, key, number = attempt_id.split("-")
        return left[key, number[0]].pop(0)

    r = rig(shifts=shifts, rules=rules, outcomes=outcome_of)
    report = r.run()

    worked = {step.key: expected_end(planned[str(step.key), "w"], rules) for s in shifts for step in s.steps}
    given_up = [key for key, end in worked.items() if end[0] is StepState.GIVEN_UP]
    redone = {key: expected_end(planned[str(key), "r"], rules) for key in given_up}
    for key, end in worked.items():
        assert r.result(key.shift, key.job, key.step) == end
    for key, end in redone.items():
        assert r.result(key.shift, key.job, key.step, is_review=True) == end
    assert [key for answer in report.reviews for key in answer.steps] == given_up

    scores = compute_scores([r.records])
    assert scores.steps_total == len(worked)
    assert scores.steps_completed == len(worked) - len(given_up)
    assert scores.given_up == scores.retried == len(given_up)
    assert scores.redone == sum(end[0] is StepState.DONE for end in redone.values())
    assert scores.review_answers_correct == scores.reviews == len(shifts)
    assert scores.false_redo == 0
    ends = [*worked.values(), *redone.values()]
    assert (scores.attempts, scores.infra_attempts) == (
        sum(end[2] for end in ends),
        sum(end[3] for end in ends),
    )


def test_a_given_up_step_does_not_stop_the_next_one(rig):
    r = rig(outcomes={"r0-1.1.1-w1": F, "r0-1.1.1-w2": F})
    r.run()
    assert r.result(1, 1, 1)[0] is StepState.GIVEN_UP
    assert r.result(1, 1, 2)[0] is StepState.DONE


def test_hours_hold_the_exchanges_of_their_shift_and_of_no_other(rig):
    r = rig(outcomes={"r0-2.1.1-w1": F, "r0-2.1.1-w2": F})
    r.run()
    hours = sorted(r.records.hours, key=lambda h: h.start_s)
    assert [(h.shift, h.is_review) for h in hours] == [(1, False), (2, False), (1, True), (2, True)]
    assert all(first.end_s <= second.start_s for first, second in pairwise(hours))
    for h in hours:
        within = {e.index for e in r.records.exchanges if h.start_s <= e.at < h.end_s}
        own = {e.index for e in r.records.exchanges if (e.shift, e.is_review) == (h.shift, h.is_review)}
        assert within == own


def test_events_tell_the_operation_in_order(rig, plan):
    r = rig(shifts=plan(1, 1, 1), outcomes={"r0-1.1.1-w1": F, "r0-1.1.1-w2": F})
    r.run()
    step = ["planner_exchanged", "attempt_started", "attempt_ended"]
    assert [event.kind for event in r.events] == [
        "shift_started",
        *step,
        *step,
        "planner_exchanged",  # the last failure is told, the planner gives up
        "step_ended",
        "shift_ended",
        "shift_started",
        "planner_exchanged",  # the review question
        *step,
        "planner_exchanged",  # done is told, the planner says next
        "step_ended",
        "review_ended",
    ]
    times = [event.t for event in r.events]
    assert times == sorted(times)


def test_robots_run_in_threads_on_one_store(rig, plan):
    first = rig(shifts=plan(3, 2, 2), outcomes={"r0-1.1.1-w1": F})
    first.run()
    rigs = [rig(shifts=plan(3, 2, 2), store=first.store) for _ in range(4)]
    for number, r in enumerate(rigs, start=1):
        r.name = f"r{number}"
    threads = [threading.Thread(target=r.run) for r in rigs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(r.records.attempts) == 12 for r in rigs)
    assert len(first.records.attempts) == 13


def test_a_stopped_operation_goes_on_when_it_is_run_again(rig):
    r = rig()

    def stop_at_third(attempt_id):
        if len(r.robot.executed) == 3:
            r.stop.set()
        return D

    r.robot = type(r.robot)(stop_at_third)
    with pytest.raises(OperationStoppedError, match=r"^robot r0: stopped$"):
        r.run()
    assert r.result(1, 2, 1)[0] is StepState.RUNNING
    assert r.result(1, 2, 2)[0] is StepState.PENDING
    r.stop.clear()
    r.run()
    assert len(r.robot.executed) == 8
    assert compute_scores([r.records]).steps_completed == 8


def test_a_cancelled_operation_stays_cancelled(rig):
    r = rig()
    r.stop.set()
    with pytest.raises(OperationStoppedError):
        r.run()
    r.stop.clear()
    assert cancel_operation("r0", r.store) == 8
    assert {record.state for record in r.records.steps} == {StepState.CANCELLED}
    with pytest.raises(OperationCancelledError, match=r"^robot r0: the operation was cancelled$"):
        r.run()
    assert r.robot.executed == []


def test_a_resumed_run_must_have_the_same_plan(rig, plan):
    r = rig()
    r.run()
    r.shifts = plan(1, 1, 1)
    with pytest.raises(RecordMismatchError, match="recorded plan"):
        r.run()


def test_a_resumed_run_must_have_the_same_rules(rig, plan):
    r = rig(shifts=plan(1, 1, 1), outcomes={"r0-1.1.1-w1": F, "r0-1.1.1-w2": I})
    r.run()
    [step] = [record for record in r.records.steps if not record.is_review]
    r.store.save_step(replace(step, state=StepState.RUNNING))  # killed before the step was over
    r.rules = replace(r.rules, max_attempts=7)
    with pytest.raises(RecordMismatchError, match=r"attempt 1 of 2.*attempt 1 of 7"):
        r.run()


def test_a_clock_that_went_back_is_refused(rig):
    r = rig()
    r.run()
    crew = r.crew()
    crew.journal.clock.offset_s = 0.0
    with pytest.raises(RecordMismatchError, match="run clock"):
        crew.journal.begin(r.shifts)
