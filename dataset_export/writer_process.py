"""The recorder in a process of its own, fed by the robots' threads through one bounded queue.

    robot thread: on_frame → queue (bounded) → feeder thread → pipe → writer process: Recorder
    robot thread: finish   ← future          ← reply thread  ← pipe ←

A full queue makes the robot wait; nothing is ever dropped, and every wait is counted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from dayshift.dataset_export.errors import RecordingError, describe_os_error
from dayshift.dataset_export.recorder import Recorder, Recording
from dayshift.processes import start_without_ctrl_c
from dayshift.sim.types import CONTROL_HZ, Frame, RolloutSpec, RolloutStart

QUEUE_CAPACITY = 128  # frames; with two 256-pixel pictures each, 50 MB
_LOOK_AGAIN_S = 0.2  # how often a waiting robot looks whether the writer is still alive


@dataclass(frozen=True, slots=True)
class _Start:
    attempt_id: str
    spec: RolloutSpec
    start: RolloutStart


@dataclass(frozen=True, slots=True)
class _Frame:
    attempt_id: str
    t: float
    frame: Frame


@dataclass(frozen=True, slots=True)
class _End:
    attempt_id: str


@dataclass(frozen=True, slots=True)
class _Abort:
    attempt_id: str


_Message = _Start | _Frame | _End | _Abort


@dataclass(frozen=True, slots=True)
class _Failure:
    attempt_id: str
    message: str


@dataclass(frozen=True, slots=True)
class _CannotStart:
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderStats:
    """How often and how long robots waited for the recorder."""

    num_frames: int = 0
    num_waits: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0


class RecorderProcess:
    """A `Recorder` in its own process. Thread-safe; use as a context manager.

    `now` gives seconds on the run clock. Every call raises RecordingError once the writer process
    is gone, or when the disk refused something of the attempt concerned.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        now: Callable[[], float],
        fps: int = CONTROL_HZ,
        queue_capacity: int = QUEUE_CAPACITY,
    ) -> None:
        self._now = now
        self._stats = RecorderStats()
        self._lock = threading.Lock()
        self._futures: dict[str, Future[Recording]] = {}
        self._is_gone = threading.Event()
        self._why_not_started = ""
        self._queue: queue.Queue[_Message | None] = queue.Queue(queue_capacity)

        context = multiprocessing.get_context("spawn")
        requests_out, self._requests = context.Pipe(duplex=False)
        self._replies, replies_in = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_serve, args=(requests_out, replies_in, run_dir, fps), name="recorder", daemon=True
        )
        start_without_ctrl_c(self._process)
        requests_out.close()  # only the writer holds the far ends now, so that each side sees the other die
        replies_in.close()
        self._feeder = threading.Thread(target=self._feed, name="recorder-feeder", daemon=True)
        self._collector = threading.Thread(target=self._collect, name="recorder-replies", daemon=True)
        self._feeder.start()
        self._collector.start()

    @property
    def stats(self) -> RecorderStats:
        return self._stats

    @property
    def process_id(self) -> int | None:
        return self._process.pid

    def attempt(self, attempt_id: str) -> AttemptRecording:
        """Begin an attempt; files appear at its `on_start`."""
        with self._lock:
            if self._is_gone.is_set():
                raise RecordingError(self._why_gone())
            self._futures[attempt_id] = Future()
        return AttemptRecording(self, attempt_id)

    def close(self) -> None:
        """Write all that is queued, throw away attempts that were not finished, end the process."""
        if not self._is_gone.is_set():
            self._wait_for_room(None)
        self._feeder.join()
        self._process.join()
        self._collector.join()
        self._replies.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- called by AttemptRecording ------------------------------------------------------------

    def start(self, attempt_id: str, spec: RolloutSpec, start: RolloutStart) -> None:
        self._put(_Start(attempt_id, spec, start))

    def frame(self, attempt_id: str, frame: Frame) -> None:
        self._put(_Frame(attempt_id, self._now(), frame))
        with self._lock:
            self._stats = replace(self._stats, num_frames=self._stats.num_frames + 1)

    def end(self, attempt_id: str) -> Recording:
        future = self._futures[attempt_id]
        try:
            self._put(_End(attempt_id))
            return future.result()
        finally:
            del self._futures[attempt_id]

    def abort(self, attempt_id: str) -> None:
        self._futures.pop(attempt_id, None)
        if not self._is_gone.is_set():
            self._wait_for_room(_Abort(attempt_id))

    # --- inside ----------------------------------------------------------------------------------

    def _put(self, message: _Message) -> None:
        future = self._futures[message.attempt_id]
        if future.done():
            future.result()  # raises: the attempt has failed already
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            started = time.perf_counter()
            self._wait_for_room(message)
            self._count_wait(time.perf_counter() - started)

    def _wait_for_room(self, message: _Message | None) -> None:
        while True:
            if self._is_gone.is_set():
                raise RecordingError(self._why_gone())
            try:
                return self._queue.put(message, timeout=_LOOK_AGAIN_S)
            except queue.Full:
                continue

    def _count_wait(self, waited_s: float) -> None:
        with self._lock:
            stats = self._stats
            self._stats = replace(
                stats,
                num_waits=stats.num_waits + 1,
                waited_s=stats.waited_s + waited_s,
                longest_wait_s=max(stats.longest_wait_s, waited_s),
            )

    def _feed(self) -> None:
        with self._requests:
            while (message := self._queue.get()) is not None:
                try:
                    self._requests.send(message)
                except BrokenPipeError:
                    return  # the collector sees the same death and tells everybody

    def _collect(self) -> None:
        while True:
            try:
                reply: Recording | _Failure | _CannotStart = self._replies.recv()
            except EOFError:
                break
            if isinstance(reply, _CannotStart):
                self._why_not_started = reply.message
                continue
            future = self._futures.get(reply.attempt_id)
            if future is None or future.done():
                continue
            if isinstance(reply, _Failure):
                future.set_exception(RecordingError(reply.message))
            else:
                future.set_result(reply)
        self._process.join()
        with self._lock:
            self._is_gone.set()
            for future in self._futures.values():
                if not future.done():
                    future.set_exception(RecordingError(self._why_gone()))
        # The feeder may wait for a message that never comes. If the queue is full it has one, and
        # meets the broken pipe.
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)

    def _why_gone(self) -> str:
        if self._why_not_started:
            return self._why_not_started
        code = self._process.exitcode
        return f"the recorder process has ended (exit code {code}): nothing more can be recorded"


class AttemptRecording:
    """One attempt on its way to the disk: pass `on_start` and `on_frame` to the simulator.

    Leaving the `with` block by an exception throws the attempt away, unless it is finished.
    """

    def __init__(self, recorder: RecorderProcess, attempt_id: str) -> None:
        self.attempt_id = attempt_id
        self._recorder = recorder
        self._has_started = False
        self._is_over = False

    def on_start(self, spec: RolloutSpec, start: RolloutStart) -> None:
        self._has_started = True
        self._recorder.start(self.attempt_id, spec, start)

    def on_frame(self, frame: Frame) -> None:
        """Queue a frame; its arrays must not change afterwards."""
        self._recorder.frame(self.attempt_id, frame)

    def finish(self) -> Recording:
        """Wait until the attempt is on the disk. An attempt that never started has no files."""
        self._is_over = True
        if not self._has_started:
            self._recorder.abort(self.attempt_id)
            return Recording(attempt_id=self.attempt_id, num_frames=0, num_images={}, num_bytes=0)
        return self._recorder.end(self.attempt_id)

    def abort(self) -> None:
        """Throw the attempt away."""
        self._is_over = True
        self._recorder.abort(self.attempt_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_over:
            self.abort()


def _serve(requests: Connection, replies: Connection, run_dir: Path, fps: int) -> None:
    """Main function of the writer process: until the far end closes, or is killed."""
    with contextlib.suppress(BrokenPipeError):
        try:
            recorder = Recorder(run_dir, fps=fps)
        except (OSError, RecordingError) as error:
            replies.send(_CannotStart(_describe(error, run_dir)))
            return
        with recorder:
            # What a run sent before its writer could begin lies in the pipe. If the run has been killed
            # meanwhile, it was repaired or resumed without it, and must not be surprised by it.
            run = multiprocessing.parent_process()
            if run is None or run.is_alive():
                _write_all(recorder, requests, replies, run_dir)


def _write_all(recorder: Recorder, requests: Connection, replies: Connection, run_dir: Path) -> None:
    failed: set[str] = set()
    for message in _until_closed(requests):
        if message.attempt_id in failed:
            continue
        try:
            recording = _apply(recorder, message)
        except (OSError, RecordingError, ValueError) as error:
            failed.add(message.attempt_id)
            recorder.on_abort(message.attempt_id)  # first: it makes room on a full disk
            replies.send(_Failure(message.attempt_id, _describe(error, run_dir)))
        else:
            if recording is not None:
                replies.send(recording)


def _until_closed(requests: Connection) -> Iterator[_Message]:
    while True:
        try:
            yield requests.recv()
        except (EOFError, OSError):  # OSError: the parent was killed in the middle of a message
            return


def _apply(recorder: Recorder, message: _Message) -> Recording | None:
    match message:
        case _Start(attempt_id, spec, start):
            recorder.on_start(attempt_id, spec, start)
        case _Frame(attempt_id, t, frame):
            recorder.on_frame(attempt_id, t, frame)
        case _End(attempt_id):
            return recorder.on_end(attempt_id)
        case _Abort(attempt_id):
            recorder.on_abort(attempt_id)
    return None


def _describe(error: Exception, run_dir: Path) -> str:
    return describe_os_error(error, run_dir) if isinstance(error, OSError) else str(error)
