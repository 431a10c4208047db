"""Replies that cannot be used, and no reply at all: repaired once, counted, never a hang."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dayshift.engine.api import FinishReason
from dayshift.planner.clients.api import PlannerReply
from dayshift.planner.errors import OperationStoppedError, PlannerCallError, PlannerLostError
from dayshift.planner.protocol import GiveUp, format_reply, repair_message
from dayshift.planner.scores import compute_scores
from dayshift.types import GiveUpReason, Outcome, StepKey

DOWN = PlannerCallError("server is down", is_transient=True)
REFUSED = PlannerCallError("server answered 400", is_transient=False)
NEXT = '{"action":"next"}'


@pytest.fixture
def run_faulty(rig, faulty_planner, plan):
    """Run one shift of one job of `num_steps`, the planner's n-th reply being replaced."""

    def run(replies, num_steps=1, outcomes=None):
        planner = faulty_planner(replies)
        r = rig(shifts=plan(1, 1, num_steps), planner=planner, outcomes=outcomes or {})
        r.run()
        return r

    return run


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (
            PlannerReply(text='{"action":"exe', finish_reason=FinishReason.LENGTH),
            "it was cut off",
        ),
        (
            PlannerReply(text="", finish_reason=FinishReason.ERROR),
            "it ended early (error)",
        ),
        (NEXT, "the step has not been tried yet"),
        ('{"action":"execute","task":"dance"}', "the step is: turn on the stove"),
        ("put the bowl down", "not valid JSON (Expecting value)"),
        ('{"redo":[]}', "expected an execute, next or give_up command"),
    ],
)
def test_an_unusable_reply_is_repaired_once_with_the_error_told(run_faulty, reply, error):
    r = run_faulty({1: reply})
    assert r.planner.messages[1] == repair_message(error)
    assert r.result(1, 1, 1) == ("done", None, 1, 0)
    first, repair = r.records.exchanges[:2]
    assert (first.problem, first.is_repair) == (error, False)
    assert (repair.problem, repair.is_repair) == ("", True)
    assert compute_scores([r.records]).refused_replies == 1


def test_a_second_unusable_reply_gives_the_step_up(run_faulty, cut_off):
    r = run_faulty({1: cut_off, 2: NEXT}, num_steps=2)
    assert r.result(1, 1, 1) == ("given_up", GiveUpReason.PLANNER, 0, 0)
    assert r.result(1, 1, 2) == ("done", None, 1, 0)
    assert r.robot.executed[0].attempt_id == "r0-1.1.2-w1"
    assert compute_scores([r.records]).refused_replies == 2


def test_a_step_that_the_robot_has_done_is_done_whatever_the_planner_says(run_faulty):
    wrong = format_reply(GiveUp(StepKey(1, 1, 1), "turn on the stove"))
    r = run_faulty({2: wrong, 3: wrong})
    assert r.result(1, 1, 1) == ("done", None, 1, 0)
    assert [e.problem for e in r.records.exchanges[1:3]] == ["the step is done"] * 2


def test_an_early_give_up_is_honoured(run_faulty):
    early = format_reply(GiveUp(StepKey(1, 1, 1), "turn on the stove"))
    r = run_faulty({2: early}, outcomes={"r0-1.1.1-w1": Outcome.FAILED})
    assert r.result(1, 1, 1) == ("given_up", GiveUpReason.PLANNER, 1, 0)
    assert compute_scores([r.records]).refused_replies == 0


def test_a_give_up_of_another_step_is_refused(run_faulty):
    other = format_reply(GiveUp(StepKey(1, 1, 2), "turn on the stove"))
    failed = {"r0-1.1.1-w1": Outcome.FAILED, "r0-1.1.1-w2": Outcome.FAILED}
    r = run_faulty({3: other}, outcomes=failed)
    assert r.planner.messages[3] == repair_message("the step is shift 1, job 1, step 1")
    assert r.result(1, 1, 1) == ("given_up", GiveUpReason.ATTEMPTS, 2, 0)


def test_a_failed_call_is_repeated_and_counted(run_faulty):
    r = run_faulty({1: DOWN, 2: DOWN})
    assert r.planner.messages[:3] == [r.planner.messages[0]] * 3
    assert r.records.exchanges[0].num_retries == 2
    assert r.records.exchanges[0].error == ""
    assert r.result(1, 1, 1) == ("done", None, 1, 0)


def test_a_planner_that_stays_down_ends_the_step_with_a_code(run_faulty):
    r = run_faulty({1: DOWN, 2: DOWN, 3: DOWN}, num_steps=2)
    assert r.result(1, 1, 1) == ("given_up", GiveUpReason.INFRA, 0, 0)
    assert r.result(1, 1, 2) == ("done", None, 1, 0)
    assert r.records.exchanges[0].error == "server is down"
    scores = compute_scores([r.records])
    assert scores.planner_failures == 1
    assert scores.planner_calls == len(r.records.exchanges) - 1


def test_a_planner_that_refuses_a_call_is_not_asked_it_again(run_faulty):
    r = run_faulty({1: REFUSED}, num_steps=2)
    assert r.planner.messages[1].startswith("Shift 1, job 1, step 2")
    assert r.result(1, 1, 1) == ("given_up", GiveUpReason.INFRA, 0, 0)


def test_a_done_step_stays_done_when_the_planner_cannot_be_told(run_faulty):
    r = run_faulty({2: REFUSED})
    assert r.result(1, 1, 1) == ("done", None, 1, 0)


def test_a_lost_planner_stops_the_operation_which_can_be_resumed(rig, faulty_planner, plan):
    planner = faulty_planner(dict.fromkeys(range(3, 6), REFUSED))
    r = rig(shifts=plan(1, 1, 6), planner=planner)
    with pytest.raises(PlannerLostError, match=r"3 questions in a row \(server answered 400\)"):
        r.run()
    assert [r.result(1, 1, k)[0] for k in range(1, 7)] == [
        "done",
        "given_up",
        "given_up",
        "running",  # the question that stopped the operation is asked again
        "pending",
        "pending",
    ]
    r.run()
    assert [r.result(1, 1, k)[0] for k in range(4, 7)] == ["done"] * 3


def test_only_outages_in_a_row_stop_the_operation(run_faulty):
    r = run_faulty({1: REFUSED, 4: REFUSED, 7: REFUSED}, num_steps=6)
    states = [r.result(1, 1, k)[0] for k in range(1, 7)]
    assert states == ["given_up", "done"] * 3


def test_a_message_without_a_reply_is_not_part_of_the_conversation(run_faulty, faulty_planner):
    r = run_faulty({1: REFUSED}, num_steps=2)
    r.planner = faulty_planner()
    r.run()
    assert r.planner.history == r.records.exchanges[1:]


def test_a_stop_ends_the_wait_before_a_retry(rig, faulty_planner, plan):
    stop = threading.Event()
    planner = faulty_planner({1: DOWN})
    rules = rig().rules
    r = rig(
        shifts=plan(1, 1, 1),
        planner=planner,
        rules=replace(rules, planner_retry_delays_s=(3600.0,)),
        stop=stop,
    )
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    with pytest.raises(OperationStoppedError):
        r.run()
    timer.join()
    assert r.records.exchanges == ()


def test_a_review_without_a_usable_answer_is_invalid_and_redoes_nothing(run_faulty, cut_off):
    failed = {"r0-1.1.1-w1": Outcome.FAILED, "r0-1.1.1-w2": Outcome.FAILED}
    r = run_faulty({4: cut_off, 5: '{"redo":1}'}, outcomes=failed)
    [answer] = r.records.answers
    assert (answer.is_valid, answer.steps) == (False, ())
    assert [a.is_review for a in r.robot.executed] == [False, False]
    scores = compute_scores([r.records])
    assert (scores.reviews, scores.review_answers_correct, scores.retried) == (1, 0, 0)


def test_an_invalid_answer_is_not_correct_even_when_nothing_was_given_up(run_faulty, cut_off):
    r = run_faulty({3: cut_off, 4: cut_off})
    assert compute_scores([r.records]).review_answers_correct == 0
