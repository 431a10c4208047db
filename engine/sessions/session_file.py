"""One session's file: its text in memory, its KV on disk. No torch here.

Text is the truth, KV a cache. A turn that was acknowledged is never lost to a crash; a KV piece that
is damaged, missing or of another model raises KVUnavailableError, and is computed again from text.
docs/session-store.md describes the file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from crc32c import crc32c

from dayshift.engine.api import SessionLockedError, StoreCorruptError, StoreError, StoreFullError
from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.archive import KVRead, KVUnavailableError
from dayshift.engine.sessions.lease import Lease
from dayshift.engine.sessions.payload_io import PayloadIO, PayloadRead
from dayshift.engine.sessions.record_format import NO_KV, KVFormat, Record, RecordHeader, RecordKind
from dayshift.engine.sessions.record_writer import RecordWriter
from dayshift.engine.sessions.records import KVPiece, LayoutRecord, SessionRecord, TurnRecord

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class StoreCounters:
    """What happened to KV in a store since it was opened."""

    num_late_reads: int = 0  # given up after the deadline
    num_evicted_sessions: int = 0  # whose KV was dropped for the quota


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """A session's file as the store has opened it, and what it needs of the store.

    `lease` None: for reading only. `make_room(n)` keeps n more bytes of KV within the quota, or raises
    StoreFullError.
    """

    file: io.FileIO
    path: Path
    payloads: PayloadIO
    lease: Lease | None
    make_room: Callable[[int], None]
    counters: StoreCounters

    def close(self) -> None:
        """Let go of the file and its lock."""
        self.payloads.close()
        self.file.close()


class SessionFile:
    """An open session, made by `SessionStore`. It is a SessionArchive.

    Appends are durable when they return; an append that fails raises StoreError and leaves file and
    object as they were. One writer: the open file holds the session's lock and lease. Appends of several
    threads go one after the other; all else is one thread's.

    Attributes:
        has_foreign_tokens: token ids of another model are in it (its identity differs): they have
            to be made again from the text. The other model's KV is not offered.
        is_lost: another engine took the session over; nothing can be appended any more.
    """

    def __init__(self, opened: OpenedFile, *, identity: bytes, nonce: bytes, session: SessionRecord) -> None:
        self.session = session
        self.turns: list[TurnRecord] = []
        self.layout: LayoutRecord | None = None
        self.has_foreign_tokens = False
        self.is_lost = False
        self._opened = opened
        self._path = opened.path
        self._identity = identity
        self._writer = RecordWriter(opened.file, opened.payloads, nonce, opened.lease)
        self._kv_headers: dict[int, RecordHeader] = {}
        self._appending = threading.Lock()

    @classmethod
    def create(
        cls, opened: OpenedFile, *, identity: bytes, session: SessionRecord, turns: Iterable[TurnRecord] = ()
    ) -> Self:
        """Write the first records into an empty file that has no name yet."""
        nonce = os.urandom(record_format.NONCE_BYTES)
        created = cls(opened, identity=identity, nonce=nonce, session=session)
        with created._writer.synced_once():
            created._append_text(RecordKind.SESSION, session)
            for turn in turns:
                created.append_turn(turn)
        return created

    @classmethod
    def load(cls, opened: OpenedFile, *, identity: bytes) -> Self:
        """Read all text of a file and cut a torn append off its end.

        Raises StoreCorruptError if records stand behind a damaged one, or the first is damaged.
        """
        loaded = cls.read(opened, identity=identity)
        writer = loaded._writer
        if record_format.has_record_after(opened.file.fileno(), writer.end, writer.nonce):
            raise StoreCorruptError(
                f"damaged at byte {writer.end}, after {len(loaded.turns)} turns; more follows",
                opened.path,
            )
        writer.cut_to_end()
        return loaded

    @classmethod
    def read(cls, opened: OpenedFile, *, identity: bytes) -> Self:
        """Read all text of a file, and leave the file as it is: it may be another engine's.

        Raises StoreCorruptError if the first record is damaged.
        """
        records = record_format.scan(opened.file.fileno())
        first = first_record(records, opened.path)
        session = decoded(first, SessionRecord, opened.path)
        loaded = cls(opened, identity=identity, nonce=first.header.nonce, session=session)
        loaded._note(first.header)
        for record in records:
            loaded._note(record.header)
            match record.header.kind:
                case RecordKind.TURN:
                    turn = decoded(record, TurnRecord, opened.path)
                    if turn.index != len(loaded.turns):
                        raise StoreCorruptError(
                            f"turn {turn.index} stands behind {len(loaded.turns)} turns",
                            opened.path,
                        )
                    loaded.turns.append(turn)
                case RecordKind.LAYOUT:
                    loaded.layout = decoded(record, LayoutRecord, opened.path)
        return loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._opened.close()

    def append_turn(self, turn: TurnRecord) -> None:
        """Add a turn; its index must be the next one."""
        if turn.index != len(self.turns):
            raise ValueError(f"turn {turn.index} appended after {len(self.turns)} turns")
        self._append_text(RecordKind.TURN, turn, turn_index=turn.index)
        self.turns.append(turn)

    def append_layout(self, layout: LayoutRecord) -> None:
        """Note the context as it stands now; the last layout counts."""
        self._append_text(RecordKind.LAYOUT, layout)
        self.layout = layout

    def append_kv(self, turn_index: int, piece: KVPiece) -> None:
        """Add the KV of a turn, or of SYSTEM; a later piece of the same turn replaces it."""
        payload = memoryview(np.ascontiguousarray(piece.data))
        self._opened.make_room(len(payload) + 2 * record_format.PAGE_BYTES)
        self._append(RecordKind.KV, payload, turn_index=turn_index, kv=piece.format)

    def has_kv(self, turn_index: int) -> bool:
        """Whether a KV piece of this model is there; whether it is whole shows when it is read."""
        return turn_index in self._kv_headers

    def read_kv(self, turn_index: int) -> KVPiece:
        """The KV of a turn, checked. Raises KVUnavailableError: none, damaged, or unreadable."""
        read = self.open_kv(turn_index)
        try:
            return read.run()
        except KVUnavailableError:
            self.refuse_kv(read)
            raise

    def open_kv(self, turn_index: int) -> FileKVRead:
        """A read of a turn's KV, which may run in another thread. Raises KVUnavailableError: none."""
        header = self._kv_headers.get(turn_index)
        if header is None:
            raise KVUnavailableError(f"{self._path}: no KV of turn {turn_index} for this model")
        return FileKVRead(self._path, header, self._opened.payloads)

    def refuse_kv(self, read: KVRead) -> None:
        """Offer a piece no more that could not be read; it is written again once it is computed again."""
        assert isinstance(read, FileKVRead), "made by `open_kv`"
        self._opened.counters.num_late_reads += read.is_late
        if self._kv_headers.get(read.turn_index) is read.header:
            del self._kv_headers[read.turn_index]

    def _append_text(
        self, kind: RecordKind, record: SessionRecord | TurnRecord | LayoutRecord, *, turn_index: int = -1
    ) -> None:
        payload = msgspec.json.encode(record)
        if msgspec.json.decode(payload, type=type(record)) != record:
            raise ValueError(f"{record} does not read back as it is written")
        self._append(kind, memoryview(payload), turn_index=turn_index)

    def _append(
        self, kind: RecordKind, payload: memoryview, *, turn_index: int, kv: KVFormat = NO_KV
    ) -> None:
        with self._appending:
            if not self._writer.is_sound:
                raise StoreError("a failed append could not be undone; open the session again", self._path)
            try:
                with store_errors(self._path):
                    header = self._writer.append(
                        kind, payload, identity=self._identity, turn_index=turn_index, kv=kv
                    )
            except SessionLockedError:
                self.is_lost = True
                raise
            self._take_up(header)

    def _note(self, header: RecordHeader) -> None:
        """Take up a record that stands in the file."""
        self._writer.skip(header)
        self._take_up(header)

    def _take_up(self, header: RecordHeader) -> None:
        is_own = header.identity == self._identity
        if header.kind in (RecordKind.SESSION, RecordKind.TURN):
            self.has_foreign_tokens |= not is_own
        elif header.kind is RecordKind.KV and is_own:
            self._kv_headers[header.turn_index] = header


class FileKVRead:
    """A KV piece of a file that is to be read. It is a KVRead.

    `is_late`: the disk did not answer within the deadline.
    """

    def __init__(self, path: Path, header: RecordHeader, payloads: PayloadIO) -> None:
        self.header = header
        self.is_late = False
        self._path = path
        self._payload = PayloadRead(payloads, header.payload_bytes, header.payload_offset)

    @property
    def turn_index(self) -> int:
        return self.header.turn_index

    @property
    def form(self) -> KVFormat:
        return self.header.kv

    @property
    def num_bytes(self) -> int:
        return self.header.payload_bytes

    def run(self) -> KVPiece:
        """Raises KVUnavailableError: damaged, unreadable, late, or given up."""
        try:
            data = self._payload.run()
            if crc32c(data) != self.header.payload_crc:
                raise EOFError("wrong checksum")
        except (OSError, EOFError) as error:
            self.is_late = isinstance(error, TimeoutError)
            raise KVUnavailableError(f"{self._path}: KV of turn {self.turn_index}: {error}") from error
        return KVPiece(self.header.kv, data)

    def give_up(self) -> None:
        """Let `run` raise at once, or as soon as it is called."""
        self._payload.give_up()


def first_record(records: Iterator[Record], path: Path) -> Record:
    """The session's own record. Raises StoreCorruptError, and StoreError for another format."""
    first = next(records, None)
    if first is None or first.header.kind is not RecordKind.SESSION:
        raise StoreCorruptError("not a session file, or its first record is damaged", path)
    if (version := first.header.version) != record_format.FORMAT_VERSION:
        raise StoreError(f"written in format {version}, not {record_format.FORMAT_VERSION}", path)
    return first


def decoded[T](record: Record, kind: type[T], path: Path) -> T:
    """What a text record says. Raises StoreCorruptError: its checksum fits, and still it says nothing."""
    try:
        return msgspec.json.decode(record.payload, type=kind)
    except msgspec.MsgspecError as error:
        raise StoreCorruptError(
            f"the record at byte {record.header.offset} is no {kind.__name__}: {error}", path
        ) from error


@contextlib.contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's error into a StoreError of one line that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise StoreFullError(f"no space is left ({error.strerror})", path) from error
        raise StoreError(error.strerror or str(error), path) from error
