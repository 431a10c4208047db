"""Rendering what an export would still have to render: in the background, while a run goes on or later.

    python -m dayshift.dataset_export.prerender RUN_DIR [DATABASE_URL]    until the run is over

Each attempt's pictures are rendered once it has ended and kept beside its other files; an export takes
what is there. Killed at any moment, it goes on where it was when it is started again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dayshift.dataset_export.dense_video import (
    LazyRenderer,
    MakeRenderer,
    make_dense,
    missing_cameras,
    simulator_renderer,
)
from dayshift.dataset_export.durable import has_writer
from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, BusyError, first_line, raise_if_disk_full
from dayshift.dataset_export.run_folder import RecordedAttempt, RunFolder, open_run
from dayshift.dataset_export.video import H264, Codec
from dayshift.sim.types import CAMERAS, Camera
from dayshift.types import DayshiftError, Outcome

LOW_PRIORITY = 10  # nice: a robot that needs a core gets it, and an export that waits is not starved
LOOK_AGAIN_S = 1.0
OVER_AFTER_S = 10.0  # without a recorder; one that starts or resumes is there by then


@dataclass(frozen=True, slots=True, kw_only=True)
class PrerenderOptions:
    """Which pictures are rendered. With `follow`, those of attempts to come, too, until the run is over."""

    cameras: tuple[Camera, ...] = CAMERAS
    codec: Codec = H264
    follow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PrerenderReport:
    """What was done: attempts rendered here, attempts that had all pictures, broken ones and why."""

    num_rendered: int
    num_present: int
    broken: dict[str, str]  # attempt id -> one line


def prerender(
    run: RunFolder,
    options: PrerenderOptions = PrerenderOptions(),
    *,
    make_renderer: MakeRenderer = simulator_renderer,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> PrerenderReport:
    """Render the missing pictures of a run's attempts, in order of time."""
    num_rendered, broken = 0, dict[str, str]()
    with LazyRenderer(make_renderer) as renderer:
        for pending in _rounds(run, options, broken):
            for number, attempt in enumerate(pending):
                on_progress(number, len(pending))
                try:
                    num_rendered += make_dense(
                        attempt, options.cameras, renderer.get, options.codec, patience_s=0.0
                    )
                except BusyError:
                    time.sleep(LOOK_AGAIN_S)  # an export renders it just now; the next round will see
                except BROKEN_FILE_ERRORS as error:
                    raise_if_disk_full(error, attempt.folder)
                    broken[attempt.attempt.attempt_id] = first_line(error)
            on_progress(len(pending), len(pending))
    num_whole = sum(1 for _ in _exportable(run)) - len(broken)
    return PrerenderReport(num_rendered=num_rendered, num_present=num_whole - num_rendered, broken=broken)


def _rounds(
    run: RunFolder, options: PrerenderOptions, broken: dict[str, str]
) -> Iterator[list[RecordedAttempt]]:
    """What is missing, again and again, until nothing is and nothing will come."""
    seen_at = time.monotonic()
    while True:
        is_going_on = options.follow and has_writer(run.path)
        pending = [
            attempt
            for attempt in _exportable(run)
            if attempt.attempt.attempt_id not in broken
            and missing_cameras(attempt, options.cameras, options.codec)
        ]
        if pending:
            yield pending
        if pending or is_going_on:
            seen_at = time.monotonic()
        elif not options.follow or time.monotonic() - seen_at > OVER_AFTER_S:
            return
        if not pending:
            time.sleep(LOOK_AGAIN_S)


def _exportable(run: RunFolder) -> Iterator[RecordedAttempt]:
    """Attempts that say something about the robot; where the simulator broke, nothing is rendered."""
    return (one for one in run.recorded_attempts() if one.attempt.outcome != Outcome.INFRA)


class PrerenderProcess:
    """`prerender` with `follow`, in a process of low priority beside the run. A context manager."""

    def __init__(self, run_dir: Path, database: str | None) -> None:
        command = [sys.executable, "-m", "dayshift.dataset_export.prerender", str(run_dir)]
        # In a session of its own: Ctrl-C is for the run, which ends this process in order.
        self._process = subprocess.Popen(
            [*command, *([database] if database else [])], start_new_session=True
        )

    def close(self) -> None:
        """End it, in the middle of an attempt if need be: what is missing can be rendered later."""
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main(arguments: Sequence[str]) -> None:
    """Follow the run that the command line names."""
    os.nice(LOW_PRIORITY)
    try:
        with open_run(Path(arguments[0]), database=arguments[1] if len(arguments) > 1 else None) as run:
            report = prerender(run, PrerenderOptions(follow=True))
    except DayshiftError as error:
        sys.exit(f"dayshift: nothing more is rendered beside the run: {error}")
    for attempt_id, reason in report.broken.items():
        print(f"dayshift: attempt {attempt_id} cannot be rendered: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
