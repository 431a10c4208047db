"""The worker processes of an engine, as rank 0 sees them: started, told, watched, ended.

Each hangs on a socket pair: it ends when the engine's end is closed, however that came. A thread here
watches for the other direction: a worker that has ended, or that does not answer, is the end of the group.
All workers are then killed, what waits for them fails, and every further use raises why.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from dayshift.engine.config import EngineConfig
from dayshift.engine.models.shard import Shard
from dayshift.engine.tensor_parallel.group import join_group, open_store
from dayshift.engine.tensor_parallel.messages import (
    Failed,
    FromWorker,
    Ping,
    Pong,
    Ready,
    Started,
    Stop,
    ToWorker,
)
from dayshift.engine.wire import EngineDiedError
from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)

PING_EVERY_S = 5.0
ANSWER_TIMEOUT_S = 120.0  # of a step, however long its prompt
_START_TIMEOUT_S = 300.0  # of a process, before it loads the model
_LOAD_TIMEOUT_S = 1800.0
_END_TIMEOUT_S = 10.0
_NOTICE_S = 2.0  # between a broken connection and the news of who has ended
_EXIT_CODE = 70

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """What a worker is started with."""

    config: EngineConfig
    model: Path
    rank: int
    store_port: int


@dataclass(slots=True, eq=False)
class _Worker:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    answered_at: float | None = None  # None: it loads still, and is not asked
    asked_at: float | None = None  # None: no answer is owed
    is_ping_sent: bool = False


class Workers:
    """All ranks but the first. Made by `start_workers`, ended by `close`."""

    def __init__(self, workers: list[_Worker], device: torch.device) -> None:
        self.size = len(workers) + 1
        self.failure: str | None = None
        """Why the group has ended, in one line; None while it works."""
        self.alarm, self._ring = multiprocessing.Pipe(duplex=False)
        """Readable from the moment when the group has ended: for who waits for something else."""
        self._workers = workers
        self._is_cuda = device.type == "cuda"
        self._lock = threading.Lock()  # of the connections' sending side
        self._started_at = time.monotonic()
        self._are_ready = threading.Event()
        self._failing = threading.Lock()
        self._has_failed = threading.Event()
        self._is_closed = threading.Event()
        self._waker, self._wake = multiprocessing.Pipe()
        self._watcher = threading.Thread(target=self._watch, name="dayshift-workers", daemon=True)
        self._watcher.start()

    @property
    def shard(self) -> Shard:
        """The part of the model that this process has."""
        return Shard(0, self.size)

    @contextmanager
    def told(self, command: ToWorker) -> Iterator[None]:
        """Tell the workers, and do the same in here. Raises EngineDiedError when the group has ended."""
        with self.explained():
            self._tell(command)
            yield

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Errors in here that come from the end of a worker become an EngineDiedError that says so.

        All others end the group, too: the ranks are no longer at the same place.
        """
        self.check()
        try:
            yield
        except BaseException as error:
            if isinstance(error, RuntimeError | OSError):
                self._has_failed.wait(_NOTICE_S)
            if not self._end_group(f"rank 0 failed in the midst of a step: {type(error).__name__}"):
                raise EngineDiedError(self.failure or "") from error
            raise

    def wait_until_ready(self) -> None:
        """Until all have loaded their parts; from then on they are asked whether they work."""
        self._are_ready.wait()
        self.check()

    def check(self) -> None:
        """Raise EngineDiedError if the group has ended: what the device gave since then means nothing."""
        if self.failure is not None:
            raise EngineDiedError(self.failure)

    def close(self) -> None:
        """End the workers, and leave the group."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._waker.send_bytes(b"")
        self._watcher.join()
        if self.failure is None:
            with suppress(OSError):  # one that has just ended
                self._tell(Stop())
        if self.failure is None or not self._is_cuda:  # NCCL's group was aborted
            dist.destroy_process_group()
        _end(self._workers)

    def _tell(self, command: ToWorker) -> None:
        data = _encoder.encode(command)
        with self._lock:
            for worker in self._workers:
                worker.connection.send_bytes(data)

    def _watch(self) -> None:
        """Until `close`, or until the group has ended."""
        connections = [worker.connection for worker in self._workers]
        while not self._is_closed.is_set() and self.failure is None:
            ready = wait([*connections, self._wake], PING_EVERY_S)
            for worker in self._workers:
                if worker.connection in ready:
                    self._receive(worker)
                self._ask(worker)
        # An engine core that hangs in a call of the device all the same ends here; whoever has the engine in
        # a program of their own gets the error with their next call.
        if not self._is_closed.wait(_END_TIMEOUT_S) and multiprocessing.parent_process() is not None:
            os._exit(_EXIT_CODE)

    def _receive(self, worker: _Worker) -> None:
        try:
            message = _decoder.decode(worker.connection.recv_bytes())
        except (EOFError, OSError):
            if not self._is_closed.is_set():
                self._fail(f"{_name(worker)} ended ({_exit_code(worker)})")
            return
        match message:
            case Failed(reason):
                self._fail(f"{_name(worker)}: {reason}")
            case Ready() | Pong():
                worker.answered_at, worker.asked_at, worker.is_ping_sent = time.monotonic(), None, False
                if all(other.answered_at is not None for other in self._workers):
                    self._are_ready.set()
            case Started():
                raise AssertionError("comes before the watch")

    def _ask(self, worker: _Worker) -> None:
        now = time.monotonic()
        if worker.answered_at is None:
            if now - self._started_at > _LOAD_TIMEOUT_S:
                self._fail(f"{_name(worker)} has not loaded the model within {_LOAD_TIMEOUT_S:.0f} s")
            return
        if now - worker.answered_at < PING_EVERY_S:
            return
        if worker.asked_at is None:
            worker.asked_at = now
        if now - worker.asked_at > ANSWER_TIMEOUT_S:
            self._fail(f"{_name(worker)} has not answered for {ANSWER_TIMEOUT_S:.0f} s")
        elif not worker.is_ping_sent and self._lock.acquire(blocking=False):
            # Not free: the engine tells something, or waits for a worker to read. Then again, the next time.
            try:
                with suppress(OSError):  # it has ended, as the next wait tells
                    worker.connection.send_bytes(_encoder.encode(Ping()))
                worker.is_ping_sent = True
            finally:
                self._lock.release()

    def _fail(self, reason: str) -> None:
        if self._end_group(reason):
            logger.error("tensor parallel: %s", reason)

    def _end_group(self, reason: str) -> bool:
        """Kill all workers, and free whoever waits for them; False if the group had ended before."""
        with self._failing:
            if self.failure is not None:
                return False
            self.failure = reason
        self._has_failed.set()
        self._ring.close()
        self._are_ready.set()  # whoever waits for it goes on to the failure
        for worker in self._workers:
            worker.process.kill()
        if self._is_cuda and dist.group.WORLD is not None:
            dist.group.WORLD.abort()  # ends kernels that wait for the others
        return True


def start_workers(config: EngineConfig, model: Path, device: torch.device) -> Workers:
    """Start all ranks but the first, and join them. They load their parts meanwhile.

    Raises DayshiftError when this process has such a group already, EngineDiedError for a worker that ends.
    """
    if dist.is_initialized():
        raise DayshiftError("one engine with tensor_parallel can run in a process at a time")
    store = open_store()
    started: list[_Worker] = []
    try:
        for rank in range(1, config.tensor_parallel):
            task = WorkerTask(config=config, model=model, rank=rank, store_port=store.port)
            started.append(_start(task))
        for worker in started:
            _wait_until_started(worker)
        join_group(store, 0, config.tensor_parallel, device)
    except BaseException:
        for worker in started:
            worker.process.kill()
        _end(started)
        raise
    return Workers(started, device)


def _start(task: WorkerTask) -> _Worker:
    # Not through multiprocessing: a daemon, as an engine core is, may not have children there.
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "dayshift.engine.tensor_parallel.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the engine, which ends its workers
        )
    connection = Connection(ours.detach())
    connection.send(task)
    return _Worker(task.rank, process, connection)


def _wait_until_started(worker: _Worker) -> None:
    if not wait([worker.connection], _START_TIMEOUT_S):
        raise EngineDiedError(f"{_name(worker)} did not start within {_START_TIMEOUT_S:.0f} s")
    try:
        message = _decoder.decode(worker.connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise EngineDiedError(f"{_name(worker)} ended while it started ({_exit_code(worker)})") from error
    assert isinstance(message, Started), message


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        try:
            worker.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            logger.error("%s did not end and is killed", _name(worker))
            worker.process.kill()
            worker.process.wait()
        worker.connection.close()


def _name(worker: _Worker) -> str:
    return f"rank {worker.rank} of the model's processes"


def _exit_code(worker: _Worker) -> str:
    try:
        return f"exit code {worker.process.wait(_NOTICE_S)}"
    except subprocess.TimeoutExpired:
        return "still running"
