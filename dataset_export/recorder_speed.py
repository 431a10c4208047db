"""How long robots wait for the recorder, and whether it stays as fast: fed with recorded frames.

Rendering is slower than recording, so the frames of a finished run are fed to a recorder of its own, which
writes them as it does in a run: in its own process, states to parquet, pictures as H.264, flushed to disk.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.dense_video import dense_path
from dayshift.dataset_export.run_folder import RecordedAttempt
from dayshift.dataset_export.video import VideoReader
from dayshift.dataset_export.writer_process import RecorderProcess
from dayshift.sim.types import CAMERAS, Frame

# An interrupt that another thread takes, or that comes just before a wait, does not end the wait.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFrames:
    """An attempt in memory: what a simulator would send again."""

    start: files.StartFile
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRow:
    """What robots that fed `pairs_per_s` frames, each with two pictures, had to wait per frame."""

    num_robots: int
    pairs_per_s: float  # fed, or taken when fed as fast as possible, while all robots were at it
    num_frames: int  # all of them, those after it included
    p50_ms: float
    p99_ms: float
    longest_ms: float
    num_waits: int  # as the recorder counts them: calls that found the queue full
    waited_s: float
    num_written: int  # frames read back from the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodesRow:
    """Recording episodes `first` to `last` of a run."""

    first: int
    last: int
    frames_per_s: float
    rss_mb: float  # of the writer process, after the last


def load_frames(recorded: RecordedAttempt) -> RecordedFrames:
    """Decode an attempt that has a picture for every control step."""
    table = recorded.frames()
    images = {}
    for camera in CAMERAS:
        with VideoReader(dense_path(recorded, camera), fps=recorded.fps) as video:
            images[camera] = [image for _, image in video.frames()]
    frames = tuple(
        Frame(
            index=i,
            sim_state=table.sim_state[i],
            robot_state=table.robot_state[i],
            action=table.action[i],
            reward=float(table.reward[i]),
            success=bool(table.success[i]),
            images={camera: pictures[i] for camera, pictures in images.items()},
        )
        for i in range(len(table))
    )
    return RecordedFrames(start=recorded.start(), frames=frames)


def measure_waits(
    run_dir: Path,
    attempts: Sequence[RecordedFrames],
    *,
    num_robots: int,
    pairs_per_s: float | None,
    duration_s: float,
) -> WaitRow:
    """Feed frames for a time, at a rate in all (None: as fast as they are taken)."""
    waits: list[list[tuple[float, float]]] = [[] for _ in range(num_robots)]  # (when, how long)
    stop = threading.Event()
    with (
        RecorderProcess(run_dir, now=time.monotonic) as recorder,
        ThreadPoolExecutor(num_robots, "robot") as threads,
    ):
        started = time.monotonic()

        def operate(robot: int) -> None:
            def on_wait(seconds: float) -> None:
                waits[robot].append((time.monotonic(), seconds))

            due = _schedule(started + robot / num_robots * 0.1, num_robots, pairs_per_s)
            for number in itertools.count():
                if stop.is_set() or time.monotonic() > started + duration_s:
                    return
                attempt = attempts[(robot + number) % len(attempts)]
                _record(recorder, f"{robot}-{number}", attempt, due, on_wait, stop)

        unfinished = {threads.submit(operate, robot) for robot in range(num_robots)}
        try:
            while unfinished:
                done, unfinished = wait(unfinished, _LOOK_S, FIRST_EXCEPTION)
                for robot in done:
                    robot.result()
        finally:
            stop.set()
        stats = recorder.stats
    times, seconds = np.concatenate([np.array(of_robot) for of_robot in waits]).T
    all_ms = 1000 * seconds
    return WaitRow(
        num_robots=num_robots,
        pairs_per_s=float((times <= started + duration_s).sum()) / duration_s,
        num_frames=len(all_ms),
        p50_ms=float(np.percentile(all_ms, 50)),
        p99_ms=float(np.percentile(all_ms, 99)),
        longest_ms=float(all_ms.max()),
        num_waits=stats.num_waits,
        waited_s=stats.waited_s,
        num_written=sum(
            len(files.read_frames(path)) for path in run_dir.glob(f"{files.ATTEMPTS}/*/{files.FRAMES}")
        ),
    )


def measure_episodes(
    run_dir: Path, attempt: RecordedFrames, *, num_episodes: int, rows_of: int, num_frames: int
) -> Iterator[EpisodesRow]:
    """Record the first `num_frames` of an attempt again and again, as fast as they are taken."""
    short = RecordedFrames(start=attempt.start, frames=attempt.frames[:num_frames])
    never = threading.Event()
    with RecorderProcess(run_dir, now=time.monotonic) as recorder:
        for first in range(1, num_episodes + 1, rows_of):
            last = min(first + rows_of - 1, num_episodes)
            started = time.monotonic()
            for number in range(first, last + 1):
                _record(recorder, f"episode-{number}", short, itertools.repeat(0.0), lambda _: None, never)
            elapsed_s = time.monotonic() - started
            yield EpisodesRow(
                first=first,
                last=last,
                frames_per_s=(last - first + 1) * len(short.frames) / elapsed_s,
                rss_mb=resident_mb(recorder.process_id),
            )


def resident_mb(process_id: int | None) -> float:
    """Memory of a process, in MiB."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


def _schedule(start: float, num_robots: int, pairs_per_s: float | None) -> Iterator[float]:
    """When a robot's frames are due, on the monotonic clock."""
    interval = num_robots / pairs_per_s if pairs_per_s else 0.0
    return (start + interval * number for number in itertools.count())


def _record(
    recorder: RecorderProcess,
    attempt_id: str,
    recorded: RecordedFrames,
    due: Iterator[float],
    on_wait: Callable[[float], None],
    stop: threading.Event,
) -> None:
    """Record an attempt, each frame when it is due; until `stop` is set."""
    with recorder.attempt(attempt_id) as attempt:
        attempt.on_start(recorded.start.spec, recorded.start.start)
        for frame in recorded.frames:
            if stop.wait(max(0.0, next(due) - time.monotonic())):
                return
            started = time.perf_counter()
            attempt.on_frame(frame)
            on_wait(time.perf_counter() - started)
        attempt.finish()
