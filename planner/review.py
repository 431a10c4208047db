"""The review of a shift: the planner names, from memory, what was given up; that is tried again.

Nothing of the records enters a review but the shift's number and hours and, for a step that the
planner itself has listed, the plan's sentence.
"""

from __future__ import annotations

from dayshift.engine.api import RecallRange
from dayshift.planner.crew import Crew
from dayshift.planner.dialogue import Question
from dayshift.planner.errors import PlannerUnavailableError, UnusableReplyError
from dayshift.planner.jobs import JobStep, ReviewAnswer, Shift, ShiftReport
from dayshift.planner.protocol import REVIEW_SCHEMA, Redo, parse_review, review_message
from dayshift.planner.rules import is_same_sentence
from dayshift.planner.shift import lead_step
from dayshift.types import StepKey


def run_review(shift: Shift, report: ShiftReport, crew: Crew) -> ReviewAnswer:
    """Ask which steps of a shift were given up, and lead the robot through those again.

    Goes on where an earlier process stopped. Raises PlannerLostError and OperationStoppedError.
    """
    crew.journal.begin_hours(shift.number, is_review=True)
    hours = RecallRange(report.start_s, report.end_s)
    answer = ask_review(shift, hours, crew)
    crew.journal.save_answer(answer)
    for step in listed_steps(answer, shift):
        lead_step(step, crew, is_review=True)
    crew.journal.end_review(answer)
    return answer


def ask_review(shift: Shift, hours: RecallRange, crew: Crew) -> ReviewAnswer:
    """The planner's list, held against the plan; an empty, invalid one when it gave none."""
    question = Question(
        message=review_message(shift.number),
        schema=REVIEW_SCHEMA,
        max_tokens=crew.rules.max_review_tokens,
        shift=shift.number,
        is_review=True,
        recall_range=hours,
    )
    try:
        return check_answer(crew.dialogue.ask(question, parse_review), shift)
    except (UnusableReplyError, PlannerUnavailableError):
        return ReviewAnswer(shift=shift.number, steps=(), is_valid=False)


def check_answer(redo: Redo, shift: Shift) -> ReviewAnswer:
    """Note which listed steps are not in the plan, and which carry another sentence than the plan's."""
    plan = {step.key: step for step in shift.steps}
    listed = {StepKey(shift.number, job, step): task for job, step, task in redo.steps}
    return ReviewAnswer(
        shift=shift.number,
        steps=tuple(StepKey(shift.number, job, step) for job, step, _ in redo.steps),
        is_valid=True,
        refused=tuple(key for key in listed if key not in plan),
        mismatched=tuple(
            key for key, task in listed.items() if key in plan and not is_same_sentence(task, plan[key].task)
        ),
    )


def listed_steps(answer: ReviewAnswer, shift: Shift) -> tuple[JobStep, ...]:
    """The plan's steps that the planner listed, each once, in the planner's order."""
    plan = {step.key: step for step in shift.steps}
    return tuple(plan[key] for key in dict.fromkeys(answer.steps) if key in plan)
