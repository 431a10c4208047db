"""A run's tables, read by column: an hour of a hundred robots is a hundred thousand rows.

Plain tuples instead of mapped rows: ten times faster, and the texts of exchanges stay in the database
until somebody looks at them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from sqlalchemy import Text, cast, create_engine, func, select
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import StaticPool

from dayshift.dataset_export.store import DATABASE, database_url
from dayshift.dataset_export.tables import (
    AttemptRow,
    ExchangeRow,
    JobStepRow,
    RecordingRow,
    ReviewAnswerRow,
    RobotRow,
    RunRow,
    ShiftRow,
)
from dayshift.types import DayshiftError

CONFIG = "config.yaml"
# An attempt or exchange is committed a moment after the time it carries; how far back to look again.
_LATE_ATTEMPT_S = 30.0
_LATE_EXCHANGE_S = 600.0


class AttemptRecord(NamedTuple):
    """An attempt that has ended."""

    attempt_id: str
    robot: str
    shift: int
    job: int
    step: int
    number: int
    is_review: bool
    task: str
    outcome: str
    num_control_steps: int
    start_s: float
    end_s: float
    detail: str

    @property
    def key(self) -> tuple[int, int, int, bool]:
        return self.shift, self.job, self.step, self.is_review


class Ledger(msgspec.Struct, frozen=True):
    """What the page shows of `engine.api.TokenLedger`."""

    computed: int = 0
    recomputed: int = 0
    reused: int = 0
    restored: int = 0
    recalled: int = 0
    generated: int = 0
    restore_ms: float = 0.0
    recall_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0


class ExchangeRecord(NamedTuple):
    """An exchange with the planner, without its texts."""

    robot: str
    idx: int
    at: float
    latency_s: float
    shift: int
    job: int | None
    step: int | None
    is_review: bool
    ledger: Ledger
    num_recalled: int  # turns put back for this call
    has_problem: bool
    is_answered: bool

    @property
    def end_s(self) -> float:
        return self.at + self.latency_s


_EXCHANGE_COLUMNS = ExchangeRecord._fields[:8]  # as they are in the table


class StepRecord(NamedTuple):
    """State of a job step."""

    robot: str
    shift: int
    job: int
    step: int
    is_review: bool
    task: str
    state: str
    reason: str | None

    @property
    def key(self) -> tuple[int, int, int, bool]:
        return self.shift, self.job, self.step, self.is_review


class HoursRecord(NamedTuple):
    """Hours of a shift or of its review; `end_s` None while it runs."""

    robot: str
    shift: int
    is_review: bool
    start_s: float
    end_s: float | None


class RecordsReader:
    """Reads one run's records; safe beside a run that is going on. Close it after use."""

    def __init__(self, run_dir: Path) -> None:
        self._engine = _connect(run_dir)
        self.run_id = self._find_run(run_dir)
        self._data_version: object = None

    def has_changed(self) -> bool:
        """Whether somebody has committed since this was last asked. True when the database cannot say."""
        if self._engine.dialect.name != "sqlite":
            return True
        with self._engine.connect() as connection:
            version = connection.exec_driver_sql("PRAGMA data_version").scalar()
        has_changed, self._data_version = version != self._data_version, version
        return has_changed

    def run(self) -> RunRow:
        return self.rows(RunRow)[0]

    def rows(self, table: type[Any], *conditions: Any) -> list[Any]:
        """Whole rows of a table, in the order of its key."""
        columns = table.__table__.columns
        query = select(*columns).where(table.run_id == self.run_id, *conditions)
        query = query.order_by(*table.__table__.primary_key)
        return list(self._fetch(query))

    def robots(self) -> list[RobotRow]:
        """In the order in which people count: robot-2 before robot-10."""
        return sorted(self.rows(RobotRow), key=lambda row: _natural(row.robot))

    def steps(self) -> list[StepRecord]:
        """All job steps, robot by robot, in order of the plan."""
        row = JobStepRow
        return self._read(StepRecord, row, row.robot, row.shift, row.job, row.step, row.is_review)

    def hours(self) -> list[HoursRecord]:
        return self._read(HoursRecord, ShiftRow, ShiftRow.start_s)

    def attempts(self, ended_after_s: float = float("-inf")) -> list[AttemptRecord]:
        """Attempts that ended after a time, some older ones again, by end."""
        is_new = AttemptRow.end_s > ended_after_s - _LATE_ATTEMPT_S
        # Sorted here: the database would sort whole rows.
        return sorted(self._read(AttemptRecord, AttemptRow, where=[is_new]), key=attrgetter("end_s"))

    def exchanges(self, sent_after_s: float = float("-inf")) -> list[ExchangeRecord]:
        """Exchanges whose message was sent after a time, some older ones again, by robot and number."""
        row = ExchangeRow
        query = (
            select(
                *(getattr(row, name) for name in _EXCHANGE_COLUMNS),
                cast(row.ledger, Text),
                cast(row.recalled_turns, Text),
                row.problem != "",
                row.error != "",
            )
            .where(row.run_id == self.run_id, row.at > sent_after_s - _LATE_EXCHANGE_S)
            .order_by(row.robot, row.idx)  # the key's own order
        )
        decode_ledger = msgspec.json.Decoder(Ledger).decode
        return [
            ExchangeRecord(
                robot,
                idx,
                at,
                latency_s,
                shift,
                job,
                step,
                is_review,
                decode_ledger(ledger),
                turns.count(",") + 1 if len(turns) > 2 else 0,  # a JSON list of numbers
                bool(has_problem or has_error),
                not has_error,
            )
            for (
                robot,
                idx,
                at,
                latency_s,
                shift,
                job,
                step,
                is_review,
                ledger,
                turns,
                has_problem,
                has_error,
            ) in self._fetch(query)
        ]

    def talk(self, robot: str, first: int, last: int) -> list[ExchangeRow]:
        """A robot's exchanges `first` to `last`, texts included."""
        return self.rows(ExchangeRow, ExchangeRow.robot == robot, ExchangeRow.idx.between(first, last))

    def talk_of(self, robot: str, indices: Sequence[int]) -> list[ExchangeRow]:
        """Some of a robot's exchanges, texts included."""
        return self.rows(ExchangeRow, ExchangeRow.robot == robot, ExchangeRow.idx.in_(indices))

    def texts(self, robot: str, indices: Sequence[int]) -> dict[int, tuple[str, str]]:
        """Message and reply of some of a robot's exchanges."""
        row = ExchangeRow
        query = select(row.idx, row.message, row.reply).where(
            row.run_id == self.run_id, row.robot == robot, row.idx.in_(indices)
        )
        return {idx: (message, reply) for idx, message, reply in self._fetch(query)}

    def recording(self, attempt_id: str) -> RecordingRow | None:
        found = self.rows(RecordingRow, RecordingRow.attempt_id == attempt_id)
        return found[0] if found else None

    def num_recorded(self) -> int:
        """How many attempts have files."""
        query = select(func.count()).where(RecordingRow.run_id == self.run_id)
        return int(self._fetch(query)[0][0])

    def answers(self, robot: str) -> list[ReviewAnswerRow]:
        return self.rows(ReviewAnswerRow, ReviewAnswerRow.robot == robot)

    def close(self) -> None:
        self._engine.dispose()

    def _read(self, record: Any, table: type[Any], *order: Any, where: Sequence[Any] = ()) -> list[Any]:
        columns = [getattr(table, name) for name in record._fields]
        query = select(*columns).where(table.run_id == self.run_id, *where).order_by(*order)
        return list(map(record._make, self._fetch(query)))

    def _fetch(self, query: Any) -> Sequence[Any]:
        try:
            with self._engine.connect() as connection:
                return connection.execute(query).fetchall()
        except DatabaseError as error:
            where = self._engine.url.render_as_string(hide_password=True)
            raise DayshiftError(f"database {where}: {error.orig}") from error

    def _find_run(self, run_dir: Path) -> str:
        """The run of this folder; a renamed folder still holds exactly one."""
        known = [run_id for (run_id,) in self._fetch(select(RunRow.run_id))]
        name = run_dir.resolve().name
        if name in known:
            return name
        if len(known) == 1:
            return known[0]
        raise DayshiftError(f"{run_dir}: its database holds no run {name}")


def _natural(name: str) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", name)
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def has_records(run_dir: Path) -> bool:
    """Whether a folder is a run that can be opened."""
    return (run_dir / DATABASE).is_file() or _configured_url(run_dir) is not None


def _connect(run_dir: Path) -> Engine:
    url = _configured_url(run_dir) or database_url(run_dir)
    if url.startswith("sqlite") and not (run_dir / DATABASE).is_file():
        raise DayshiftError(f"{run_dir}: no run here (expected a folder with {DATABASE})")
    if url.startswith("sqlite"):
        # One connection: SQLite's count of changes (`has_changed`) is the connection's own.
        return create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    return create_engine(url)


def _configured_url(run_dir: Path) -> str | None:
    """The database that the run's configuration names, None for the default one."""
    path = run_dir / CONFIG
    config = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    return ((config or {}).get("record") or {}).get("database")
