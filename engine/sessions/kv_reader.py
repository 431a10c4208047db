"""Reads KV of archives in threads, while the engine computes for others.

In the engine's own thread, a read would hold up every step until the disk has answered. So a call whose
KV lies in an archive waits in its queue, and the engine takes up what has come between two steps: the
threads hand it over in one queue, checked and ready for the device, and touch nothing else of the engine.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from math import prod
from queue import SimpleQueue
from weakref import finalize

import numpy as np
import torch

from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.archive import KVRead, KVUnavailableError, SessionArchive
from dayshift.engine.sessions.records import KVPiece
from dayshift.engine.sessions.restore_cost import ArchiveLoad
from dayshift.engine.sessions.stored_piece import StoredPiece

NUM_READERS = 2
"""Pieces that are read at once."""

_RECENT_S = 60.0  # how long a read tells how fast archives are
_NUM_RECENT = 32


@dataclass(frozen=True, slots=True)
class ArchivedPiece:
    """A piece that is to be read from this archive."""

    archive: SessionArchive
    read: KVRead


@dataclass(slots=True, eq=False)
class Fetch:
    """One session's KV on its way from archives into host memory. All of it is the engine's thread's.

    `reads` have not come yet, in the order of the context; `pieces` have, by turn, and are kept until the
    session is laid out with them. `wait_s`: how long there were reads that had not come.
    """

    reads: dict[int, ArchivedPiece] = field(default_factory=dict)
    pieces: dict[int, StoredPiece] = field(default_factory=dict)
    num_bytes: int = 0  # of all that was asked for
    wait_s: float = 0.0
    asked_at: float = 0.0

    @property
    def is_complete(self) -> bool:
        """Nothing is on its way."""
        return not self.reads


@dataclass(frozen=True, slots=True)
class Finished:
    """A read has ended: `outcome` is the piece, or why there is none, and the seconds that it took."""

    fetch: Fetch
    archived: ArchivedPiece
    outcome: Future[tuple[StoredPiece | KVUnavailableError, float]]


class KVReader:
    """Two threads, and the sessions whose KV they read, one after the other.

    `device` and `dtype` are those of the pool: pieces are put into pinned memory for CUDA, and decoded for
    a CPU. `max_bytes` of KV are held here; a single session may take more.
    `num_bytes` are held or on their way. `wait_s` is summed over sessions. `alarm` is a descriptor that is
    readable when reads have ended that `take` has not seen.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, max_bytes: int) -> None:
        self._device, self._dtype = device, dtype
        self._max_bytes = max_bytes
        self._executor = ThreadPoolExecutor(NUM_READERS, "dayshift-kv-fetch")
        self._finished: SimpleQueue[Finished] = SimpleQueue()
        self._waiting: deque[Fetch] = deque()  # for memory; no read of theirs has begun
        self._begun: list[Fetch] = []
        self._recent: deque[tuple[float, int, float]] = deque(maxlen=_NUM_RECENT)  # when, tokens, seconds
        self.wait_s = 0.0
        self.alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close_alarm = finalize(self, os.close, self.alarm)

    @property
    def num_bytes(self) -> int:
        return sum(fetch.num_bytes for fetch in self._begun)

    @property
    def num_reading(self) -> int:
        """Sessions of which something has not come yet."""
        return len(self._waiting) + sum(not fetch.is_complete for fetch in self._begun)

    @property
    def has_finished(self) -> bool:
        """Reads have ended that `take` has not seen."""
        return not self._finished.empty()

    @property
    def load(self) -> ArchiveLoad:
        """What a further read would have to wait for, and how long reads took lately."""
        since = time.monotonic() - _RECENT_S
        fetches = (*self._begun, *self._waiting)
        return ArchiveLoad(
            num_readers=NUM_READERS,
            queued=tuple(p.read.form.num_tokens for fetch in fetches for p in fetch.reads.values()),
            recent=tuple((tokens, seconds) for ended_at, tokens, seconds in self._recent if ended_at > since),
        )

    def ask(self, fetch: Fetch, pieces: Sequence[ArchivedPiece]) -> None:
        """Read more pieces for a session, one or more, in this order."""
        if fetch.is_complete:
            fetch.asked_at = time.monotonic()
        fetch.reads |= {piece.read.turn_index: piece for piece in pieces}
        fetch.num_bytes += sum(map(self._num_bytes_of, pieces))
        if fetch in self._begun:  # what it holds is of no use without these: they do not wait for memory
            self._submit(fetch, pieces)
        elif fetch not in self._waiting:
            self._waiting.append(fetch)
            self._begin()

    def take(self, *, waits: bool) -> list[tuple[ArchivedPiece, KVUnavailableError]]:
        """Put what has been read since into its fetches; the reads that failed. `waits`: until one has ended.

        Where a read failed, its fetch ends before it: what would stand behind it is computed again.
        """
        finished = [self._finished.get()] if waits else []
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.alarm)
        while not self._finished.empty():
            finished.append(self._finished.get())
        failures = [(end.archived, self._take_up(end)) for end in finished]
        return [(archived, error) for archived, error in failures if error is not None]

    def drop(self, fetch: Fetch) -> None:
        """Forget a session's pieces, and give up what has not come."""
        self._give_up(fetch, list(fetch.reads))
        if fetch in self._begun:
            self._begun.remove(fetch)
        else:
            self._waiting.remove(fetch)
        self._begin()

    def close(self) -> None:
        """Give up all reads, and end the threads."""
        for fetch in (*self._waiting, *self._begun):
            self.drop(fetch)
        self._executor.shutdown()
        self._close_alarm()

    def check(self, fetches: Iterable[Fetch]) -> None:
        """Raise AssertionError unless these, all there are, are those known here."""
        known = [*self._waiting, *self._begun]
        assert sorted(map(id, known)) == sorted(map(id, fetches)), "KV is read for nobody, or for two"
        assert all(fetch.reads for fetch in self._waiting), "a session waits for nothing"

    def _begin(self) -> None:
        """Let the next sessions' reads begin while there is memory for them, or nobody takes any."""
        while self._waiting:
            fetch = self._waiting[0]
            if self._begun and self.num_bytes + fetch.num_bytes > self._max_bytes:
                return
            self._begun.append(self._waiting.popleft())
            self._submit(fetch, list(fetch.reads.values()))

    def _submit(self, fetch: Fetch, pieces: Sequence[ArchivedPiece]) -> None:
        for piece in pieces:
            outcome = self._executor.submit(self._read, piece.read)
            outcome.add_done_callback(partial(self._hand_over, fetch, piece))

    def _read(self, read: KVRead) -> tuple[StoredPiece | KVUnavailableError, float]:
        """In a thread."""
        began_at = time.monotonic()
        try:
            piece = self._prepared(read.run())
        except KVUnavailableError as error:
            piece = error
        return piece, time.monotonic() - began_at

    def _hand_over(self, fetch: Fetch, archived: ArchivedPiece, outcome: Future) -> None:
        """In a thread."""
        self._finished.put(Finished(fetch, archived, outcome))
        os.eventfd_write(self.alarm, 1)

    def _prepared(self, piece: KVPiece) -> StoredPiece:
        """A piece as the pool takes it with the least work. In a thread."""
        form = piece.format
        codecs.check_payload(form, piece.data.size)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                try:
                    pinned = torch.empty(piece.data.size, dtype=torch.uint8, pin_memory=True)
                except RuntimeError as error:
                    raise KVUnavailableError(f"no pinned memory for {piece.data.size} bytes") from error
            np.copyto(pinned.numpy(), piece.data)
            return StoredPiece(form, [pinned])
        payload = torch.from_numpy(piece.data)
        if form.codec != "raw":
            kv = codecs.decode_payload(form, payload, dtype=self._dtype)
            encoded = codecs.encode_payload("raw", kv)
            form, payload = encoded.form, encoded.payload
        return StoredPiece(form, [payload])

    def _num_bytes_of(self, archived: ArchivedPiece) -> int:
        """What a piece takes when it has come, at most."""
        form = archived.read.form
        is_decoded = self._device.type != "cuda" and form.codec != "raw"
        return prod(form.dims) * self._dtype.itemsize if is_decoded else archived.read.num_bytes

    def _take_up(self, end: Finished) -> KVUnavailableError | None:
        """Why a read failed, if anybody still wants it."""
        fetch, turn = end.fetch, end.archived.read.turn_index
        piece, seconds = end.outcome.result()
        if fetch.reads.get(turn) is not end.archived:
            return None
        self._recent.append((time.monotonic(), end.archived.read.form.num_tokens, seconds))
        if isinstance(piece, KVUnavailableError):
            turns = list(fetch.reads)
            self._give_up(fetch, turns[turns.index(turn) :])
            return piece
        fetch.pieces[turn] = piece
        self._remove(fetch, turn)
        return None

    def _give_up(self, fetch: Fetch, turns: Iterable[int]) -> None:
        for turn in turns:
            fetch.reads[turn].read.give_up()
            self._remove(fetch, turn)

    def _remove(self, fetch: Fetch, turn: int) -> None:
        """One read less to come."""
        del fetch.reads[turn]
        if fetch.is_complete:
            waited_s = time.monotonic() - fetch.asked_at
            fetch.wait_s += waited_s
            self.wait_s += waited_s
