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
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from crc32c import crc32c

from dayshift.engine.api import EngineError
from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.archive import KVUnavailableError
from dayshift.engine.sessions.record_format import NO_KV, KVFormat, RecordHeader, RecordKind
from dayshift.engine.sessions.records import KVPiece, LayoutRecord, SessionRecord, TurnRecord

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreError(EngineError):
    """The store cannot read or write a file."""


class StoreFullError(StoreError):
    """No space is left on the store's disk; the session is as it was before the append."""

    status = 507


class StoreCorruptError(StoreError):
    """A record of a session file is damaged, and it is not just the torn end of the file."""


class SessionFile:
    """An open session, made by `SessionStore`. It is a SessionArchive.

    Appends are durable when they return; an append that fails raises StoreError and leaves file and
    object as they were. One writer: the open file holds the session's lock. Not thread-safe.

    Attributes:
        has_foreign_tokens: token ids of another model are in it (its identity differs): they have
            to be made again from the text. The other model's KV is not offered.
    """

    def __init__(
        self, file: io.FileIO, path: Path, *, identity: bytes, nonce: bytes, session: SessionRecord
    ) -> None:
        self.session = session
        self.turns: list[TurnRecord] = []
        self.layout: LayoutRecord | None = None
        self.has_foreign_tokens = False
        self._file = file
        self._path = path
        self._identity = identity
        self._nonce = nonce
        self._kv_headers: dict[int, RecordHeader] = {}
        self._end = 0  # where the next record goes
        self._num_records = 0
        self._is_sound = True  # False: a failed append could not be undone

    @classmethod
    def create(cls, file: io.FileIO, path: Path, *, identity: bytes, session: SessionRecord) -> Self:
        """Write the first record into an empty file."""
        nonce = os.urandom(record_format.NONCE_BYTES)
        created = cls(file, path, identity=identity, nonce=nonce, session=session)
        created._append_text(RecordKind.SESSION, session)
        return created

    @classmethod
    def load(cls, file: io.FileIO, path: Path, *, identity: bytes) -> Self:
        """Read all text of a file and cut a torn append off its end.

        Raises StoreCorruptError if records stand behind a damaged one, or the first is damaged.
        """
        loaded = cls.read(file, path, identity=identity)
        if record_format.has_record_after(file.fileno(), loaded._end, loaded._nonce):
            raise StoreCorruptError(
                f"{path}: damaged at byte {loaded._end}, after {len(loaded.turns)} turns; more follows"
            )
        loaded._cut_to_end()
        return loaded

    @classmethod
    def read(cls, file: io.FileIO, path: Path, *, identity: bytes) -> Self:
        """Read all text of a file, and leave the file as it is: it may be another engine's.

        Raises StoreCorruptError if the first record is damaged.
        """
        records = record_format.scan(file.fileno())
        first = next(records, None)
        if first is None or first.header.kind is not RecordKind.SESSION:
            raise StoreCorruptError(f"{path}: not a session file, or its first record is damaged")
        if (version := first.header.version) != record_format.FORMAT_VERSION:
            raise StoreError(f"{path}: written in format {version}, not {record_format.FORMAT_VERSION}")
        session = msgspec.json.decode(first.payload, type=SessionRecord)
        loaded = cls(file, path, identity=identity, nonce=first.header.nonce, session=session)
        loaded._note(first.header)
        for record in records:
            loaded._note(record.header)
            match record.header.kind:
                case RecordKind.TURN:
                    loaded.turns.append(msgspec.json.decode(record.payload, type=TurnRecord))
                case RecordKind.LAYOUT:
                    loaded.layout = msgspec.json.decode(record.payload, type=LayoutRecord)
        return loaded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file and its lock."""
        self._file.close()

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
        self._append(RecordKind.KV, payload, turn_index=turn_index, kv=piece.format)

    def has_kv(self, turn_index: int) -> bool:
        """Whether a KV piece of this model is there; whether it is whole shows when it is read."""
        return turn_index in self._kv_headers

    def read_kv(self, turn_index: int) -> KVPiece:
        """The KV of a turn, checked. Raises KVUnavailableError: none, damaged, or unreadable."""
        header = self._kv_headers.get(turn_index)
        if header is None:
            raise KVUnavailableError(f"{self._path}: no KV of turn {turn_index} for this model")
        data = np.empty(header.payload_bytes, dtype=np.uint8)
        try:
            record_format.read_all(self._file.fileno(), memoryview(data), header.payload_offset)
            if crc32c(data) != header.payload_crc:
                raise EOFError("wrong checksum")
        except (OSError, EOFError) as error:
            del self._kv_headers[turn_index]  # so that it is written again once it is computed again
            raise KVUnavailableError(f"{self._path}: KV of turn {turn_index}: {error}") from error
        return KVPiece(header.kv, data)

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
        if not self._is_sound:
            raise StoreError(f"{self._path}: a failed append could not be undone; open the session again")
        header = RecordHeader(
            kind=kind,
            sequence=self._num_records,
            offset=self._end,
            payload_bytes=len(payload),
            payload_crc=crc32c(payload),
            turn_index=turn_index,
            nonce=self._nonce,
            identity=self._identity,
            kv=kv,
        )
        with store_errors(self._path):
            try:
                self._write(header, payload)
            except BaseException:
                self._is_sound = False
                self._cut_to_end()
                self._is_sound = True
                raise
        self._note(header)

    def _write(self, header: RecordHeader, payload: memoryview) -> None:
        fd = self._file.fileno()
        if not header.is_inline:
            record_format.write_all(fd, payload, header.payload_offset)
            os.fdatasync(fd)  # a header never stands on disk before what it vouches for
        record_format.write_all(fd, memoryview(header.pack_page(payload)), header.offset)
        os.fdatasync(fd)

    def _note(self, header: RecordHeader) -> None:
        """Take up a record that stands in the file."""
        self._end = header.next_offset
        self._num_records += 1
        is_own = header.identity == self._identity
        if header.kind in (RecordKind.SESSION, RecordKind.TURN):
            self.has_foreign_tokens |= not is_own
        elif header.kind is RecordKind.KV and is_own:
            self._kv_headers[header.turn_index] = header

    def _cut_to_end(self) -> None:
        """Drop, durably, what lies behind the last whole record."""
        fd = self._file.fileno()
        if os.fstat(fd).st_size > self._end:
            os.ftruncate(fd, self._end)
            os.fsync(fd)


@contextlib.contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's error into a StoreError of one line that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFullError(f"{path}: no space for the session store ({error.strerror})") from error
        raise StoreError(f"{path}: {error.strerror or error}") from error
