"""The whole operation of one robot: all shifts, then one review of each, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dayshift.planner.crew import Crew
from dayshift.planner.jobs import ReviewAnswer, Shift, ShiftReport
from dayshift.planner.records import StepState
from dayshift.planner.review import run_review
from dayshift.planner.shift import run_shift
from dayshift.planner.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationReport:
    """A finished operation: a report and a review answer for each shift, in order."""

    robot: str
    shifts: tuple[ShiftReport, ...]
    reviews: tuple[ReviewAnswer, ...]


def run_operation(shifts: Sequence[Shift], crew: Crew) -> OperationReport:
    """Run all shifts, then all reviews; resume when the crew's store already has a part of them.

    A resumed operation repeats no finished step and goes on with the same planner conversation. Raises
    RecordMismatchError, OperationCancelledError, PlannerCallError, PlannerLostError and
    OperationStoppedError.
    """
    crew.journal.begin(shifts)
    try:
        crew.planner.open(crew.robot, crew.journal.answered)
        reports = tuple(run_shift(shift, crew) for shift in shifts)
        answers = tuple(
            run_review(shift, report, crew) for shift, report in zip(shifts, reports, strict=True)
        )
    finally:
        crew.planner.close()
    return OperationReport(robot=crew.robot, shifts=reports, reviews=answers)


def cancel_operation(robot: str, store: Store) -> int:
    """Cancel for good every step of a stopped operation that is not over; returns how many.

    An operation with a cancelled step is not resumed.
    """
    open_steps = [record for record in store.load(robot).steps if not record.state.is_final]
    for record in open_steps:
        store.save_step(replace(record, state=StepState.CANCELLED))
    return len(open_steps)
