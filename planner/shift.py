"""The planner's main loop: after every outcome the planner is asked for the next command."""

from __future__ import annotations

from dayshift.planner.crew import Crew
from dayshift.planner.dialogue import Question
from dayshift.planner.errors import PlannerUnavailableError, UnusableReplyError
from dayshift.planner.jobs import JobStep, Shift, ShiftReport, StepResult
from dayshift.planner.protocol import COMMAND_SCHEMA, parse_command, redo_message, step_message
from dayshift.planner.rules import Move, StepProgress, choose_move
from dayshift.types import GiveUpReason


def run_shift(shift: Shift, crew: Crew) -> ShiftReport:
    """Lead one robot through a shift, step after step; a given-up step does not stop the next one.

    Goes on where an earlier process stopped. Raises PlannerLostError and OperationStoppedError, after
    which the operation can be resumed.
    """
    crew.journal.begin_hours(shift.number, is_review=False)
    results = tuple(lead_step(step, crew, is_review=False) for step in shift.steps)
    return crew.journal.end_shift(shift, results)


def lead_step(step: JobStep, crew: Crew, *, is_review: bool) -> StepResult:
    """Tell the planner of a step, do what it says, tell it the outcome, until it says next or give up."""
    if (finished := crew.journal.finished_step(step, is_review=is_review)) is not None:
        return finished
    crew.journal.begin_step(step, is_review=is_review)
    progress = StepProgress(step, is_review, crew.rules)
    message = redo_message(step) if is_review else step_message(step)
    try:
        while ask_command(message, progress, crew) is Move.EXECUTE:
            crew.try_step(progress)
            message = progress.result_message()
        reason = progress.give_up_reason
    except UnusableReplyError:
        reason = GiveUpReason.PLANNER
    except PlannerUnavailableError:
        reason = GiveUpReason.INFRA
    result = progress.end(reason)
    crew.journal.end_step(result, progress.num_infra_attempts)
    return result


def ask_command(message: str, progress: StepProgress, crew: Crew) -> Move:
    """The planner's next command, as a move that fits where the step stands."""
    step = progress.step
    question = Question(
        message=message,
        schema=COMMAND_SCHEMA,
        max_tokens=crew.rules.max_command_tokens,
        shift=step.key.shift,
        is_review=progress.is_review,
        step=step.key,
        num_attempts=progress.num_attempts,
    )
    return crew.dialogue.ask(
        question, lambda reply: choose_move(parse_command(reply), progress.situation, step)
    )
