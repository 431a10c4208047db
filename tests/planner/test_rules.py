"""The retry and give-up table, row by row, with the numbers that each row counts."""

from __future__ import annotations

import pytest

from dayshift.planner.jobs import JobStep
from dayshift.planner.protocol import Execute, GiveUp, Next, ReplyError, review_message
from dayshift.planner.rules import MOVES, Move, Rules, Situation, choose_move
from dayshift.types import DayshiftError, GiveUpReason, Outcome, StepKey

STEP = JobStep(StepKey(1, 2, 3), "open the top drawer")
OTHER = StepKey(1, 2, 2)
D, F, I = Outcome.DONE, Outcome.FAILED, Outcome.INFRA  # noqa: E741
ATTEMPTS, INFRA = GiveUpReason.ATTEMPTS, GiveUpReason.INFRA

# outcomes in order -> (state, reason, attempts, infra attempts, what the planner was told last)
# with 3 attempts and 2 infra retries.
COUNTERS = [
    ([D], ("done", None, 1, 0), "Result: done."),
    ([F, D], ("done", None, 2, 0), "Result: done."),
    ([F, F, D], ("done", None, 3, 0), "Result: done."),
    ([F, F, F], ("given_up", ATTEMPTS, 3, 0), "Result: failed, attempt 3 of 3."),
    ([I, D], ("done", None, 1, 1), "Result: done."),
    ([I, I, D], ("done", None, 1, 2), "Result: done."),
    ([I, I, I], ("given_up", INFRA, 0, 3), "Result: failed, attempt 3 of 3."),
    # an infra attempt uses up no attempt, and a failed one no infra retry
    ([F, I, F, I, F], ("given_up", ATTEMPTS, 3, 2), "Result: failed, attempt 3 of 3."),
    # progress does not reset the infra counter
    ([I, I, F, I], ("given_up", INFRA, 1, 3), "Result: failed, attempt 3 of 3."),
]


@pytest.mark.parametrize("is_review", [False, True])
@pytest.mark.parametrize(("outcomes", "result", "last_message"), COUNTERS)
def test_counters(rig, faulty_planner, plan, outcomes, result, last_message, is_review):
    left = list(outcomes)
    # in a review the step has first to be given up: three failures in the shift
    before = ["r0-1.1.1-w1", "r0-1.1.1-w2", "r0-1.1.1-w3"] if is_review else []
    planner = faulty_planner()
    r = rig(
        shifts=plan(1, 1, 1),
        planner=planner,
        rules=Rules(max_attempts=3, max_infra_retries=2),
        outcomes=lambda attempt_id: F if attempt_id in before else left.pop(0) if left else D,
    )
    r.run()
    assert r.result(1, 1, 1, is_review=is_review) == result
    review_at = planner.messages.index(review_message(1))
    told = planner.messages[review_at + 1 :] if is_review else planner.messages[:review_at]
    assert told[-1] == last_message


def test_infra_retries_have_ids_of_their_own_and_are_not_told(rig, faulty_planner, plan):
    planner = faulty_planner()
    outcomes = {"r0-1.1.1-w1": F, "r0-1.1.1-w2": I}
    r = rig(shifts=plan(1, 1, 1), planner=planner, outcomes=outcomes)
    r.run()
    assert [a.attempt_id for a in r.robot.executed] == ["r0-1.1.1-w1", "r0-1.1.1-w2", "r0-1.1.1-w2i1"]
    assert [a.number for a in r.robot.executed] == [1, 2, 2]
    assert planner.messages[1:3] == ["Result: failed, attempt 1 of 2.", "Result: done."]


def test_every_command_has_a_verdict_in_every_situation():
    assert set(MOVES) == {(s, c) for s in Situation for c in (Execute, Next, GiveUp)}


@pytest.mark.parametrize(
    ("command", "situation", "move"),
    [
        (Execute("open the top drawer"), Situation.GIVEN, Move.EXECUTE),
        (Execute(" Open the  top drawer."), Situation.FAILED, Move.EXECUTE),
        (Next(), Situation.DONE, Move.FINISH),
        (GiveUp(STEP.key, STEP.task), Situation.EXHAUSTED, Move.GIVE_UP),
        (GiveUp(STEP.key, STEP.task), Situation.GIVEN, Move.GIVE_UP),
        (GiveUp(STEP.key, STEP.task), Situation.FAILED, Move.GIVE_UP),
    ],
)
def test_fitting_commands(command, situation, move):
    assert choose_move(command, situation, STEP) is move


@pytest.mark.parametrize(
    ("command", "situation", "error"),
    [
        (Next(), Situation.GIVEN, "the step has not been tried yet"),
        (Next(), Situation.FAILED, "the step is not done"),
        (Next(), Situation.EXHAUSTED, "the step is not done"),
        (Execute(STEP.task), Situation.DONE, "the step is done"),
        (Execute(STEP.task), Situation.EXHAUSTED, "no attempt is left"),
        (Execute("open the bottom drawer"), Situation.GIVEN, "the step is: open the top drawer"),
        (GiveUp(OTHER, STEP.task), Situation.EXHAUSTED, "the step is shift 1, job 2, step 3"),
        (GiveUp(STEP.key, STEP.task), Situation.DONE, "the step is done"),
    ],
)
def test_commands_that_do_not_fit(command, situation, error):
    with pytest.raises(ReplyError, match=f"^{error}$"):
        choose_move(command, situation, STEP)


@pytest.mark.parametrize(
    "numbers",
    [
        {"max_attempts": 0},
        {"max_planner_outages": 0},
        {"max_infra_retries": -1},
        {"max_repairs": -1},
        {"planner_retry_delays_s": (1.0, -1.0)},
    ],
)
def test_numbers_out_of_range_are_refused_in_one_line(numbers):
    [name] = numbers
    with pytest.raises(DayshiftError, match=rf"^rules\.{name} is .*$"):
        Rules(**numbers)
