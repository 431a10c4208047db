"""Reading a run back: facts from its database, frames and pictures from its folder.

Works on a finished run, on one that was killed, and on one that is going on: an attempt is seen
once its outcome is committed, which happens after its files are durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.store import DATABASE, RunStore, database_url, no_such_run, recorded_as, run_ids
from dayshift.dataset_export.tables import (
    FORMAT,
    AttemptRow,
    EventRow,
    ExchangeRow,
    JobStepRow,
    RecordingRow,
    ReviewAnswerRow,
    RobotRow,
    RunRow,
    ShiftRow,
)
from dayshift.dataset_export.video import VideoReader
from dayshift.sim.types import Camera
from dayshift.types import DayshiftError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAttempt:
    """A finished attempt: its outcome, what was simulated, and where its files are."""

    attempt: AttemptRow
    recording: RecordingRow
    folder: Path
    fps: int

    def frames(self) -> files.FrameTable:
        """All control steps."""
        return files.read_frames(self.folder / files.FRAMES)

    def start(self) -> files.StartFile:
        """Spec and start of the rollout."""
        return files.read_start(self.folder / files.START)

    @property
    def cameras(self) -> tuple[Camera, ...]:
        """Cameras of which pictures were rendered live."""
        return tuple(self.recording.num_images)

    def video(self, camera: Camera) -> VideoReader:
        """The pictures rendered live; close it after use (it is a context manager)."""
        return VideoReader(files.video_path(self.folder, camera), fps=self.fps)


class RunFolder:
    """A run, opened for reading. Rows are described in `tables`. Use as a context manager."""

    def __init__(self, path: Path, store: RunStore) -> None:
        self.path = path
        self._store = store

    @cached_property
    def run(self) -> RunRow:
        rows = self._store.rows(RunRow)
        if not rows:
            raise DayshiftError(f"{self.path}: the database holds no run of this name")
        return rows[0]

    def robots(self) -> list[RobotRow]:
        return self._store.rows(RobotRow)

    def job_steps(self) -> list[JobStepRow]:
        return self._store.rows(JobStepRow)

    def shifts(self) -> list[ShiftRow]:
        return self._store.rows(ShiftRow)

    def attempts(self) -> list[AttemptRow]:
        """Every attempt that has ended, recorded or not, in order of time."""
        return self._store.rows(AttemptRow)

    def recorded_attempts(self) -> list[RecordedAttempt]:
        """Every attempt that has ended and has files, in order of time."""
        recordings = {row.attempt_id: row for row in self._store.rows(RecordingRow)}
        return [
            RecordedAttempt(
                attempt=attempt,
                recording=recordings[attempt.attempt_id],
                folder=files.attempt_folder(self.path, attempt.attempt_id),
                fps=self.run.fps,
            )
            for attempt in self.attempts()
            if attempt.attempt_id in recordings
        ]

    def exchanges(self) -> list[ExchangeRow]:
        return self._store.rows(ExchangeRow)

    def review_answers(self) -> list[ReviewAnswerRow]:
        return self._store.rows(ReviewAnswerRow)

    def events(self) -> list[EventRow]:
        return self._store.rows(EventRow)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(path: Path, *, database: str | None = None) -> RunFolder:
    """Open runs/<id> for reading; `database` is the URL of a run whose records are not in run.db.

    Raises DayshiftError when there is no run, or one written by a newer Dayshift.
    """
    if database is None and not (path / DATABASE).is_file():
        raise DayshiftError(f"{path}: no run here (expected a folder with {DATABASE})")
    url = database or database_url(path)
    known = run_ids(url)
    run_id = recorded_as(path, known, is_own=database is None)
    if run_id is None:
        raise DayshiftError(no_such_run(path, known))
    folder = RunFolder(path, RunStore(url, run_id))
    if folder.run.format > FORMAT:
        folder.close()
        raise DayshiftError(
            f"{path}: recorded in format {folder.run.format}, this version reads up to {FORMAT}"
        )
    return folder
