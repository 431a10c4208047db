"""One robot's journal: what is committed, and what an earlier process left to be taken up again.

The loops are deterministic in the planner's replies and the attempts' results. So a resumed run goes
through the same loops: finished steps are answered from their records, and the step that was under
way hears its recorded replies and results again until they are used up; from there on it is live.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from dayshift.planner.errors import OperationCancelledError, RecordMismatchError
from dayshift.planner.jobs import (
    Attempt,
    AttemptEnded,
    JobStep,
    ReviewAnswer,
    ReviewEnded,
    Shift,
    ShiftEnded,
    ShiftReport,
    ShiftStarted,
    StepEnded,
    StepResult,
)
from dayshift.planner.records import (
    AttemptRecord,
    Exchange,
    PlannerExchanged,
    ShiftHours,
    StepRecord,
    StepState,
)
from dayshift.planner.store import Store
from dayshift.types import Outcome, Publish, RunClock, StepKey

Place = tuple[int, bool, StepKey | None]  # (shift, is_review, step): where an exchange belongs


class Journal:
    """Commits through the store first, then publishes. Not shared between robots."""

    def __init__(self, robot: str, store: Store, clock: RunClock, publish: Publish) -> None:
        self.robot = robot
        self.clock = clock
        self.publish = publish
        self._store = store
        records = store.load(robot)
        self._plan = records.shifts
        self._steps = {(record.step.key, record.is_review): record for record in records.steps}
        self._hours = {(hours.shift, hours.is_review): hours for hours in records.hours}
        self._answers = {answer.shift: answer for answer in records.answers}
        self._num_exchanges = len(records.exchanges)
        self._last_s = records.last_s
        self.answered = tuple(exchange for exchange in records.exchanges if not exchange.error)
        self._exchanges_left: dict[Place, deque[Exchange]] = defaultdict(deque)
        for exchange in records.exchanges:
            place = (exchange.shift, exchange.is_review, exchange.step)
            self._exchanges_left[place].append(exchange)
        self._attempts = {record.attempt.attempt_id: record for record in records.attempts}

    # --- the plan ---------------------------------------------------------------------------

    def begin(self, shifts: Sequence[Shift]) -> None:
        """Store the plan of a new operation, or check that a resumed one has the same.

        Raises RecordMismatchError and OperationCancelledError.
        """
        if not self._plan:
            self._store.save_plan(self.robot, shifts)
            return
        if self._plan != tuple(shifts):
            raise RecordMismatchError(
                f"robot {self.robot}: the recorded plan is not the plan of this run; "
                "resume with the run's own configuration"
            )
        if any(record.state is StepState.CANCELLED for record in self._steps.values()):
            raise OperationCancelledError(f"robot {self.robot}: the operation was cancelled")
        if self.clock.now() < self._last_s:
            raise RecordMismatchError(
                f"robot {self.robot}: the run clock stands at {self.clock.now():.3f} s, before the last "
                f"record at {self._last_s:.3f} s; a resumed run's clock goes on from its records"
            )

    # --- shifts and reviews -----------------------------------------------------------------

    def begin_hours(self, shift: int, *, is_review: bool) -> None:
        """A shift or its review begins, unless it had begun before."""
        if (shift, is_review) in self._hours:
            return
        self._save_hours(
            ShiftHours(robot=self.robot, shift=shift, is_review=is_review, start_s=self.clock.now())
        )
        self.publish(ShiftStarted(t=self.clock.now(), robot=self.robot, shift=shift, is_review=is_review))

    def end_shift(self, shift: Shift, results: tuple[StepResult, ...]) -> ShiftReport:
        """All steps of a shift are over. A shift that had ended before keeps its hours."""
        start_s, end_s, is_new = self._end_hours(shift.number, is_review=False)
        report = ShiftReport(
            robot=self.robot, shift=shift.number, start_s=start_s, end_s=end_s, results=results
        )
        if is_new:
            self.publish(ShiftEnded(t=end_s, robot=self.robot, report=report))
        return report

    def end_review(self, answer: ReviewAnswer) -> None:
        """Every step that the planner listed has been tried again."""
        _, end_s, is_new = self._end_hours(answer.shift, is_review=True)
        if is_new:
            self.publish(ReviewEnded(t=end_s, robot=self.robot, answer=answer))

    def save_answer(self, answer: ReviewAnswer) -> None:
        """The planner has answered a review."""
        if self._answers.get(answer.shift) != answer:
            self._store.save_answer(self.robot, answer)
            self._answers[answer.shift] = answer

    def _end_hours(self, shift: int, *, is_review: bool) -> tuple[float, float, bool]:
        """Start, end, and whether it ends only now."""
        hours = self._hours[shift, is_review]
        if hours.end_s is not None:
            return hours.start_s, hours.end_s, False
        end_s = self.clock.now()
        self._save_hours(replace(hours, end_s=end_s))
        return hours.start_s, end_s, True

    def _save_hours(self, hours: ShiftHours) -> None:
        self._store.save_hours(hours)
        self._hours[hours.shift, hours.is_review] = hours

    # --- steps and attempts -----------------------------------------------------------------

    def finished_step(self, step: JobStep, *, is_review: bool) -> StepResult | None:
        """The result of a step that was over before this process began."""
        record = self._steps.get((step.key, is_review))
        if record is None or not record.state.is_final:
            return None
        return StepResult(
            step=step,
            is_review=is_review,
            outcome=Outcome(record.state.value),
            num_attempts=record.num_attempts,
            reason=record.reason,
        )

    def begin_step(self, step: JobStep, *, is_review: bool) -> None:
        """The planner is about to be told of a step."""
        self._store.save_step(
            StepRecord(robot=self.robot, step=step, is_review=is_review, state=StepState.RUNNING)
        )

    def end_step(self, result: StepResult, num_infra_attempts: int) -> None:
        """A step is over."""
        self._store.save_step(
            StepRecord(
                robot=self.robot,
                step=result.step,
                is_review=result.is_review,
                state=StepState(result.outcome.value),
                num_attempts=result.num_attempts,
                num_infra_attempts=num_infra_attempts,
                reason=result.reason,
            )
        )
        self.publish(StepEnded(t=self.clock.now(), robot=self.robot, result=result))

    def recorded_attempt(self, attempt: Attempt) -> AttemptRecord | None:
        """The attempt as an earlier process ended it."""
        return self._attempts.get(attempt.attempt_id)

    def add_attempt(self, record: AttemptRecord) -> None:
        """An attempt has ended."""
        self._store.add_attempt(record)
        self.publish(
            AttemptEnded(t=record.end_s, robot=self.robot, attempt=record.attempt, result=record.result)
        )

    # --- exchanges --------------------------------------------------------------------------

    @property
    def next_exchange_index(self) -> int:
        """The number of the next exchange, from 1."""
        return self._num_exchanges + 1

    def recorded_exchange(self, place: Place, message: str) -> Exchange | None:
        """The next exchange that an earlier process recorded at this place.

        Raises RecordMismatchError when it began with another message.
        """
        left = self._exchanges_left[place]
        if not left:
            return None
        exchange = left.popleft()
        if exchange.message != message:
            raise RecordMismatchError(
                f"robot {self.robot}, exchange {exchange.index}: recorded is {exchange.message!r}, the run "
                f"would send {message!r}; resume with the run's own configuration"
            )
        return exchange

    def add_exchange(self, exchange: Exchange) -> None:
        """The planner has answered, or it has not."""
        self._store.add_exchange(exchange)
        self._num_exchanges += 1
        self.publish(PlannerExchanged(t=self.clock.now(), robot=self.robot, exchange=exchange))
