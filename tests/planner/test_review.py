"""Review answers are held against the plan, and against nothing else."""

from __future__ import annotations

import pytest

from dayshift.engine.api import RecallRange
from dayshift.planner.protocol import Redo, format_reply
from dayshift.planner.scores import compute_scores
from dayshift.types import Outcome, StepKey

F = Outcome.FAILED
FIRST, SECOND = "open the drawer", "put the bowl on the stove"  # the steps of the plan below
GIVEN_UP = {"r0-1.1.1-w1": F, "r0-1.1.1-w2": F}


@pytest.fixture
def answer_review(rig, faulty_planner, plan):
    """One shift of two steps, the first given up; the planner answers the review with `steps`."""

    def run(*steps, outcomes=GIVEN_UP):
        num_before = 5 if outcomes else 4
        planner = faulty_planner({num_before + 1: format_reply(Redo(steps))})
        r = rig(shifts=plan(1, 1, 2), planner=planner, outcomes=outcomes)
        r.run()
        assert planner.messages[num_before].startswith("Review of shift 1")
        [answer] = r.records.answers
        redone = [str(a.step.key) for a in r.robot.executed if a.is_review]
        return r, answer, redone

    return run


def test_the_right_answer(answer_review):
    r, answer, redone = answer_review((1, 1, FIRST))
    assert answer.steps == (StepKey(1, 1, 1),)
    assert redone == ["1.1.1"]
    assert compute_scores([r.records]).review_answers_correct == 1


def test_a_step_that_is_not_in_the_plan_is_refused_and_makes_the_answer_wrong(answer_review):
    r, answer, redone = answer_review((1, 1, FIRST), (7, 1, FIRST))
    assert answer.refused == (StepKey(1, 7, 1),)
    assert redone == ["1.1.1"]
    scores = compute_scores([r.records])
    assert scores.review_answers_correct == 0
    assert scores.false_redo == 0
    assert (scores.recall_precision, scores.recall_recall) == (0.5, 1.0)


def test_a_step_that_was_done_is_tried_again_and_counted(answer_review):
    r, answer, redone = answer_review((1, 1, FIRST), (1, 2, SECOND))
    assert answer.refused == ()
    assert redone == ["1.1.1", "1.1.2"]
    scores = compute_scores([r.records])
    assert (scores.false_redo, scores.retried, scores.redone) == (1, 1, 1)
    assert (scores.steps_completed, scores.given_up) == (1, 1)


def test_a_step_listed_twice_is_tried_once(answer_review):
    r, answer, redone = answer_review((1, 1, FIRST), (1, 1, FIRST))
    assert len(answer.steps) == 2
    assert redone == ["1.1.1"]
    assert compute_scores([r.records]).review_answers_correct == 1


def test_the_key_counts_and_the_robot_is_told_the_plans_own_sentence(answer_review):
    r, answer, redone = answer_review((1, 1, "close the drawer"))
    assert answer.mismatched == (StepKey(1, 1, 1),)
    assert redone == ["1.1.1"]
    assert r.robot.executed[-1].instruction == FIRST
    assert compute_scores([r.records]).review_answers_correct == 1


def test_steps_are_tried_again_in_the_planners_order(answer_review):
    _, _, redone = answer_review((1, 2, SECOND), (1, 1, FIRST))
    assert redone == ["1.1.2", "1.1.1"]


def test_a_forgotten_step_is_not_tried_again(answer_review):
    r, _, redone = answer_review()
    assert redone == []
    scores = compute_scores([r.records])
    assert (scores.recall_precision, scores.recall_recall, scores.recall_f1) == (1.0, 0.0, 0.0)
    assert scores.review_answers_correct == 0


def test_a_question_carries_its_shifts_hours_and_nothing_else_does(rig, faulty_planner):
    planner = faulty_planner()
    r = rig(planner=planner, outcomes=GIVEN_UP)
    r.run()
    hours = {h.shift: h for h in r.records.hours if not h.is_review}
    asked = {
        message: recall
        for message, recall in zip(planner.messages, planner.recall_ranges, strict=True)
        if recall is not None
    }
    assert asked == {
        f"Review of shift {n}: list every step given up in shift {n}.": RecallRange(h.start_s, h.end_s)
        for n, h in hours.items()
    }
