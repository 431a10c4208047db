"""The planner's `Store` on a run's database: records to rows and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from dayshift.dataset_export.store import RunStore
from dayshift.dataset_export.tables import AttemptRow, ExchangeRow, JobStepRow, ReviewAnswerRow, ShiftRow
from dayshift.engine.api import FinishReason, RecallRange, TokenLedger
from dayshift.planner.jobs import Attempt, AttemptResult, Job, JobStep, ReviewAnswer, Shift
from dayshift.planner.records import AttemptRecord, Exchange, RobotRecords, ShiftHours, StepRecord, StepState
from dayshift.types import GiveUpReason, Outcome, StepKey


class DatabaseStore:
    """A `planner.store.Store`; every write is one transaction on the run's database."""

    def __init__(self, rows: RunStore) -> None:
        self._rows = rows

    def load(self, robot: str) -> RobotRecords:
        """All records of a robot, the plan rebuilt from its steps."""
        steps = tuple(_step_record(row) for row in self._rows.rows(JobStepRow, robot=robot))
        return RobotRecords(
            robot=robot,
            shifts=_plan([record.step for record in steps if not record.is_review]),
            steps=steps,
            hours=tuple(_hours(row) for row in self._rows.rows(ShiftRow, robot=robot)),
            exchanges=tuple(_exchange(row) for row in self._rows.rows(ExchangeRow, robot=robot)),
            attempts=tuple(_attempt_record(row) for row in self._rows.rows(AttemptRow, robot=robot)),
            answers=tuple(_answer(row) for row in self._rows.rows(ReviewAnswerRow, robot=robot)),
        )

    def save_plan(self, robot: str, shifts: Sequence[Shift]) -> None:
        steps = [step for shift in shifts for step in shift.steps]
        self._rows.save(
            *(
                self._step_row(StepRecord(robot=robot, step=step, is_review=False, state=StepState.PENDING))
                for step in steps
            )
        )

    def save_step(self, record: StepRecord) -> None:
        self._rows.save(self._step_row(record))

    def save_hours(self, hours: ShiftHours) -> None:
        self._rows.save(ShiftRow(run_id=self._rows.run_id, **asdict(hours)))

    def add_exchange(self, exchange: Exchange) -> None:
        step, asked = exchange.step, exchange.recall_range
        self._rows.save(
            ExchangeRow(
                run_id=self._rows.run_id,
                robot=exchange.robot,
                idx=exchange.index,
                at=exchange.at,
                shift=exchange.shift,
                is_review=exchange.is_review,
                job=step.job if step else None,
                step=step.step if step else None,
                num_attempts=exchange.num_attempts,
                is_repair=exchange.is_repair,
                message=exchange.message,
                reply=exchange.reply,
                finish_reason=exchange.finish_reason.value,
                ledger=asdict(exchange.ledger),
                recall_start_s=asked.start_s if asked else None,
                recall_end_s=asked.end_s if asked else None,
                recalled_turns=list(exchange.recalled_turns),
                present_turns=list(exchange.present_turns),
                not_fitting_turns=list(exchange.not_fitting_turns),
                latency_s=exchange.latency_s,
                num_retries=exchange.num_retries,
                problem=exchange.problem,
                error=exchange.error,
            )
        )

    def add_attempt(self, record: AttemptRecord) -> None:
        attempt, result = record.attempt, record.result
        self._rows.save(
            AttemptRow(
                run_id=self._rows.run_id,
                attempt_id=attempt.attempt_id,
                robot=attempt.robot,
                **asdict(attempt.step.key),
                number=attempt.number,
                is_review=attempt.is_review,
                task=attempt.step.task,
                instruction=attempt.instruction,
                outcome=result.outcome.value,
                num_control_steps=result.num_control_steps,
                detail=result.detail,
                start_s=record.start_s,
                end_s=record.end_s,
            )
        )

    def save_answer(self, robot: str, answer: ReviewAnswer) -> None:
        self._rows.save(
            ReviewAnswerRow(
                run_id=self._rows.run_id,
                robot=robot,
                shift=answer.shift,
                is_valid=answer.is_valid,
                steps=_triples(answer.steps),
                refused=_triples(answer.refused),
                mismatched=_triples(answer.mismatched),
            )
        )

    def _step_row(self, record: StepRecord) -> JobStepRow:
        return JobStepRow(
            run_id=self._rows.run_id,
            robot=record.robot,
            **asdict(record.step.key),
            is_review=record.is_review,
            task=record.step.task,
            state=record.state.value,
            num_attempts=record.num_attempts,
            num_infra_attempts=record.num_infra_attempts,
            reason=record.reason.value if record.reason else None,
        )


def _plan(steps: Sequence[JobStep]) -> tuple[Shift, ...]:
    """The shifts that hold these steps, which come in order."""
    return tuple(
        Shift(shift, tuple(Job(job, tuple(members)) for job, members in groupby(part, lambda s: s.key.job)))
        for shift, part in groupby(steps, lambda s: s.key.shift)
    )


def _job_step(row: JobStepRow | AttemptRow) -> JobStep:
    return JobStep(StepKey(row.shift, row.job, row.step), row.task)


def _step_record(row: JobStepRow) -> StepRecord:
    return StepRecord(
        robot=row.robot,
        step=_job_step(row),
        is_review=row.is_review,
        state=StepState(row.state),
        num_attempts=row.num_attempts,
        num_infra_attempts=row.num_infra_attempts,
        reason=GiveUpReason(row.reason) if row.reason else None,
    )


def _hours(row: ShiftRow) -> ShiftHours:
    return ShiftHours(
        robot=row.robot, shift=row.shift, is_review=row.is_review, start_s=row.start_s, end_s=row.end_s
    )


def _exchange(row: ExchangeRow) -> Exchange:
    asked = None
    if row.recall_start_s is not None and row.recall_end_s is not None:
        asked = RecallRange(row.recall_start_s, row.recall_end_s)
    return Exchange(
        robot=row.robot,
        index=row.idx,
        shift=row.shift,
        is_review=row.is_review,
        step=None if row.job is None or row.step is None else StepKey(row.shift, row.job, row.step),
        num_attempts=row.num_attempts,
        is_repair=row.is_repair,
        at=row.at,
        message=row.message,
        reply=row.reply,
        finish_reason=FinishReason(row.finish_reason),
        ledger=TokenLedger(**row.ledger),
        recall_range=asked,
        recalled_turns=tuple(row.recalled_turns),
        present_turns=tuple(row.present_turns),
        not_fitting_turns=tuple(row.not_fitting_turns),
        latency_s=row.latency_s,
        num_retries=row.num_retries,
        problem=row.problem,
        error=row.error,
    )


def _attempt_record(row: AttemptRow) -> AttemptRecord:
    attempt = Attempt(
        attempt_id=row.attempt_id,
        robot=row.robot,
        step=_job_step(row),
        number=row.number,
        is_review=row.is_review,
        instruction=row.instruction,
    )
    result = AttemptResult(
        outcome=Outcome(row.outcome), num_control_steps=row.num_control_steps, detail=row.detail
    )
    return AttemptRecord(attempt=attempt, result=result, start_s=row.start_s, end_s=row.end_s)


def _answer(row: ReviewAnswerRow) -> ReviewAnswer:
    return ReviewAnswer(
        shift=row.shift,
        steps=_keys(row.steps),
        is_valid=row.is_valid,
        refused=_keys(row.refused),
        mismatched=_keys(row.mismatched),
    )


def _triples(keys: Sequence[StepKey]) -> list[list[int]]:
    return [[key.shift, key.job, key.step] for key in keys]


def _keys(triples: Sequence[Sequence[int]]) -> tuple[StepKey, ...]:
    return tuple(StepKey(*triple) for triple in triples)
