"""Writes KV of host memory to its sessions' files in a thread, before the room is needed.

A piece of one turn takes some 10 ms to be on disk, in which the engine's steps would wait. So when host
memory gets full, its oldest pieces are copied to their archives meanwhile; to evict one is then to forget it,
and those that are written leave first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from dayshift.engine.api import EngineError
from dayshift.engine.sessions.archive import SessionArchive
from dayshift.engine.sessions.host_pool import HostPool, PieceKey

logger = logging.getLogger(__name__)

_FULL_SHARE = 0.75  # of host memory, from which on pieces are written
NUM_LOOKED_AT = 256  # the oldest pieces; those behind them have time
_MAX_WRITES = 4  # that wait or run


class WriteBehind:
    """One thread, and the writes that it has to do. All methods are the engine's thread's.

    A write that fails is forgotten: it is tried again, and counted, when the piece has to leave.
    `num_written` pieces were written, `num_waits` times a piece had to leave before that was done.
    """

    def __init__(self, host: HostPool) -> None:
        self._host = host
        self._executor = ThreadPoolExecutor(1, "dayshift-kv-write")
        self._writes: dict[PieceKey, Future[bool]] = {}
        self.num_written = 0
        self.num_waits = 0

    def is_writing(self, key: PieceKey) -> bool:
        """Whether a write of the piece was begun and not taken up yet."""
        return key in self._writes

    def start_writes(
        self, archive_of: Callable[[PieceKey], SessionArchive], keys: Iterable[PieceKey]
    ) -> None:
        """Begin to write those of `keys` that their archives lack, if host memory is nearly full."""
        for key in [key for key, write in self._writes.items() if write.done()]:
            self.wait(key)
        if self._host.num_free > (1 - _FULL_SHARE) * self._host.num_blocks:
            return
        for key in keys:
            if len(self._writes) == _MAX_WRITES:
                return
            archive = archive_of(key)
            if key not in self._writes and not archive.has_kv(key[1]) and self._host.is_sound(key):
                self._writes[key] = self._executor.submit(self._write, archive, key)

    def go_on(self, archive_of: Callable[[PieceKey], SessionArchive], keys: Iterable[PieceKey]) -> None:
        """Begin further writes where some have ended."""
        if any(write.done() for write in self._writes.values()):
            self.start_writes(archive_of, keys)

    def wait(self, key: PieceKey) -> None:
        """Return when nothing reads the piece's memory any more."""
        write = self._writes.pop(key, None)
        if write is not None:
            self.num_waits += not write.done()
            self.num_written += write.result()

    def close(self) -> None:
        """Finish what was begun, and end the thread."""
        for key in list(self._writes):
            self.wait(key)
        self._executor.shutdown()

    def _write(self, archive: SessionArchive, key: PieceKey) -> bool:
        """In the thread; whether the archive took the piece."""
        try:
            archive.append_kv(key[1], self._host.read(key))
        except EngineError as error:
            logger.info("session %s: KV of turn %d is not written ahead: %s", *key, error)
            return False
        return True
