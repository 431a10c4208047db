"""The run's database: rows in, rows out, each call one durable transaction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from sqlalchemy import create_engine, delete, event, select
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DatabaseError
from sqlalchemy.orm import Session

from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.tables import Row, RunRow

DATABASE = "run.db"


def database_url(run_dir: Path) -> str:
    """Where a run keeps its records unless it is told another URL."""
    return f"sqlite:///{run_dir.resolve() / DATABASE}"


class RunStore:
    """Rows of one run. Thread-safe; what `save` wrote is durable when it returns.

    `url` is an SQLAlchemy URL: `sqlite:///…` (see `database_url`) or `postgresql+psycopg://…`.
    """

    def __init__(self, url: str, run_id: str) -> None:
        self.run_id = run_id
        self._engine = _connect(url)
        with _explained(self._engine):
            Row.metadata.create_all(self._engine)

    def save(self, *rows: Row) -> None:
        """Insert rows, replacing those whose key is there already, in one transaction.

        Raises RecordingError in one line when the database refuses: full disk, locked, gone.
        """
        with _explained(self._engine), Session(self._engine) as session, session.begin():
            for row in rows:
                session.merge(row)

    def rows[R: Row](self, table: type[R], **where: Any) -> list[R]:
        """This run's rows of a table that equal all of `where`, in the table's order."""
        columns = table.order_by or [column.name for column in table.__table__.primary_key]
        query = select(table).filter_by(run_id=self.run_id, **where)
        query = query.order_by(*(getattr(table, column) for column in columns))
        with _explained(self._engine), Session(self._engine) as session:
            rows = list(session.scalars(query))
            session.expunge_all()
        return rows

    def delete(self, table: type[Row], **where: Any) -> None:
        """Remove this run's rows of a table that equal all of `where`."""
        statement = delete(table).filter_by(run_id=self.run_id, **where)
        with _explained(self._engine), Session(self._engine) as session, session.begin():
            session.execute(statement)

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_records(run_dir: Path, database: str | None = None) -> RunStore:
    """The records of the run in a folder, made if the run is new; `database` is None if they are in run.db.

    Raises RecordingError where attempts are recorded in the folder and the database has no run for them: they
    would be taken for what a killed run left.
    """
    url = database or database_url(run_dir)
    store = RunStore(url, run_dir.resolve().name)
    known = run_ids(url)
    run_id = recorded_as(run_dir, known, is_own=database is None)
    if run_id == store.run_id or (run_id is None and not _has_attempts(run_dir)):
        return store
    store.close()
    if run_id is None:
        raise RecordingError(no_such_run(run_dir, known))
    return RunStore(url, run_id)


def _has_attempts(run_dir: Path) -> bool:
    from dayshift.dataset_export.attempt_files import ATTEMPTS  # loads pyarrow

    return any((run_dir / ATTEMPTS).glob("*"))


def recorded_as(run_dir: Path, known: Sequence[str], *, is_own: bool) -> str | None:
    """Which of the runs that a database holds is the one in a folder: that of the folder's name, or the only
    one of the folder's own database, since folders are renamed and copied. None if it has no such run."""
    name = run_dir.resolve().name
    if name in known:
        return name
    return known[0] if is_own and len(known) == 1 else None


def no_such_run(run_dir: Path, known: Sequence[str]) -> str:
    """What is wrong with a folder whose database has no run for it, in one line."""
    name, held = run_dir.resolve().name, ", ".join(known) or "none"
    return f"{run_dir}: the database holds no run {name} (it has: {held})"


def run_ids(url: str) -> list[str]:
    """The runs that a database holds."""
    engine = _connect(url)
    with _explained(engine), Session(engine) as session:
        found = list(session.scalars(select(RunRow.run_id).order_by(RunRow.created_at)))
    engine.dispose()
    return found


def _connect(url: str) -> Engine:
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
    return engine


def _set_up_sqlite(connection: Any, _: object) -> None:
    """Readers never wait for the writer (WAL), and a commit survives a power cut (FULL)."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute("PRAGMA busy_timeout=10000")
    cursor.close()


@contextmanager
def _explained(engine: Engine) -> Iterator[None]:
    try:
        yield
    except DatabaseError as error:
        where = engine.url.render_as_string(hide_password=True)
        raise RecordingError(f"database {where}: {str(error.orig).splitlines()[0]}") from error
