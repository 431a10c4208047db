"""What is shown of a run while it goes on."""

from __future__ import annotations

import io

from rich.console import Console

from dayshift.experiments.board import Board
from dayshift.experiments.progress import LineProgress, LiveProgress
from dayshift.planner.jobs import (
    Attempt,
    AttemptEnded,
    AttemptResult,
    AttemptStarted,
    Job,
    JobStep,
    ReviewAnswer,
    ReviewEnded,
    Shift,
    ShiftStarted,
    StepEnded,
    StepResult,
)
from dayshift.planner.records import RobotRecords, StepRecord, StepState
from dayshift.types import GiveUpReason, Outcome, StepKey

STEPS = tuple(JobStep(StepKey(1, 1, k), f"task {k}") for k in (1, 2))
PLAN = (Shift(1, (Job(1, STEPS),)),)
ROBOT = {"t": 1.0, "robot": "robot-1"}


def attempt(step=STEPS[0], number=1, is_review=False) -> Attempt:
    return Attempt(
        attempt_id="a", robot="robot-1", step=step, number=number, is_review=is_review, instruction=""
    )


def result(step, outcome, is_review=False) -> StepEnded:
    reason = GiveUpReason.ATTEMPTS if outcome is Outcome.GIVEN_UP else None
    step_result = StepResult(step=step, is_review=is_review, outcome=outcome, num_attempts=1, reason=reason)
    return StepEnded(**ROBOT, result=step_result)


EVENTS = (
    ShiftStarted(**ROBOT, shift=1, is_review=False),
    AttemptStarted(**ROBOT, attempt=attempt()),
    AttemptEnded(
        **ROBOT, attempt=attempt(), result=AttemptResult(outcome=Outcome.FAILED, num_control_steps=300)
    ),
    result(STEPS[0], Outcome.GIVEN_UP),
    result(STEPS[1], Outcome.DONE),
    ShiftStarted(**ROBOT, shift=1, is_review=True),
    result(STEPS[0], Outcome.DONE, is_review=True),
    ReviewEnded(**ROBOT, answer=ReviewAnswer(shift=1, steps=(STEPS[0].key,), is_valid=True)),
)


def test_the_board_counts_what_is_over_and_what_is_left_to_redo():
    board = Board({"robot-1": PLAN})
    assert board.remaining_s is None
    seen = []
    for event in EVENTS:
        board.update(event)
        seen.append((board.num_steps_over, board.robots["robot-1"].num_to_redo))
    assert seen == [(0, 0), (0, 0), (0, 0), (1, 1), (2, 1), (2, 1), (2, 0), (2, 0)]
    assert board.remaining_s == 0
    assert board.num_attempts == 1


def test_a_resumed_board_starts_from_the_records():
    board = Board({"robot-1": PLAN})
    done = StepRecord(robot="robot-1", step=STEPS[0], is_review=False, state=StepState.DONE)
    open_step = StepRecord(robot="robot-1", step=STEPS[1], is_review=False, state=StepState.RUNNING)
    board.take_up(RobotRecords(robot="robot-1", steps=(done, open_step)))
    assert board.num_steps_over == 1
    assert board.remaining_s is None, "nothing was timed by this process"


def test_lines_name_every_outcome():
    out = io.StringIO()
    progress = LineProgress("memory=full", Board({"robot-1": PLAN}), Console(file=out, width=40))
    for event in EVENTS:
        progress(event)
    lines = out.getvalue().splitlines()
    assert [line.split("robot-1  ")[1] for line in lines] == [
        "shift 1 begins  (0/2 steps)",
        "step 1.1.1 attempt 1 failed (300 control steps)  (0/2 steps)",
        "step 1.1.1 given up: task 1  (1/2 steps)",
        "step 1.1.2 done: task 2  (2/2 steps)",
        "review of shift 1 begins  (2/2 steps)",
        "step 1.1.1 done again: task 1  (2/2 steps)",
        "review of shift 1 ends: planner listed 1.1.1  (2/2 steps)",
    ]
    assert all(line.startswith("[memory=full] ") for line in lines)


def test_the_live_board_shows_every_step_and_what_the_robot_does():
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    progress = LiveProgress("demo", Board({"robot-1": PLAN}), console)
    for event in EVENTS[:2]:
        progress(event)
    assert "1.1.1 task 1, attempt 1" in _drawn(progress)
    for event in EVENTS[2:5]:
        progress(event)
    drawn = _drawn(progress)
    assert "✗●" in drawn
    assert "2/2 steps" in drawn


def _drawn(progress: LiveProgress) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(progress._render())
    return out.getvalue()
