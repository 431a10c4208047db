"""What can go wrong between the loops and the planner."""

from __future__ import annotations

from dayshift.types import DayshiftError


class PlannerCallError(DayshiftError):
    """A call to the planner brought no reply. The loops try it again when it `is_transient`."""

    def __init__(self, message: str, *, is_transient: bool) -> None:
        super().__init__(message)
        self.is_transient = is_transient


class PlannerUnavailableError(Exception):
    """A question stayed without a reply after all retries; the step, or the review, ends there."""


class UnusableReplyError(Exception):
    """The planner's reply was refused, and the reply to the repair too."""


class PlannerLostError(DayshiftError):
    """Too many questions in a row stayed without a reply: the operation stops and can be resumed."""


class OperationStoppedError(DayshiftError):
    """Somebody asked the operation to stop; it can be resumed."""


class OperationCancelledError(DayshiftError):
    """The operation was cancelled for good; it cannot be resumed."""


class RecordMismatchError(DayshiftError):
    """What is recorded does not belong to the plan or the rules that the run was started with."""
