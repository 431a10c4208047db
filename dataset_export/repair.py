"""Clearing up after a run that was killed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.durable import LOST_RUN_PATIENCE_S, flush_to_disk, only_writer
from dayshift.dataset_export.store import RunStore
from dayshift.dataset_export.tables import AttemptRow, RecordingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRepair:
    """What `repair_run` found: attempts that were in flight, and attempts whose files are missing."""

    removed: tuple[str, ...]  # never ended; their files are gone now
    missing: tuple[str, ...]  # ended and recorded, but somebody deleted their files

    def __str__(self) -> str:
        if not self.removed and not self.missing:
            return "nothing to repair"
        parts = []
        if self.removed:
            parts.append(f"removed {len(self.removed)} unfinished: {', '.join(self.removed)}")
        if self.missing:
            parts.append(f"files missing of {len(self.missing)}: {', '.join(self.missing)}")
        return "; ".join(parts)


def repair_run(run_dir: Path, store: RunStore) -> RunRepair:
    """Make files and records of a run agree. Raises RecordingError when the run is still going on.

    The committed outcomes are the truth: an attempt without one was in flight when the process died,
    so its files and its recording's row are removed, and the resumed run tries again.
    """
    with only_writer(run_dir, patience_s=LOST_RUN_PATIENCE_S):
        return _repair(run_dir, store)


def _repair(run_dir: Path, store: RunStore) -> RunRepair:
    ended = {row.attempt_id for row in store.rows(AttemptRow)}
    recorded = {row.attempt_id for row in store.rows(RecordingRow)}
    attempts_dir = run_dir / files.ATTEMPTS
    folders = {path.name: path for path in attempts_dir.iterdir()} if attempts_dir.is_dir() else {}

    in_flight = recorded - ended
    unfinished = [name for name in folders if name not in ended or name not in recorded]
    for name in unfinished:
        shutil.rmtree(folders[name])
    for attempt_id in in_flight:
        store.delete(RecordingRow, attempt_id=attempt_id)
    if unfinished:
        flush_to_disk(attempts_dir)
    removed = in_flight | {name.removesuffix(files.PART_SUFFIX) for name in unfinished}
    return RunRepair(
        removed=tuple(sorted(removed)), missing=tuple(sorted((recorded & ended) - folders.keys()))
    )
