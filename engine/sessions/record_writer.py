"""Appends records to a session's file: payload, sync, header, sync."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager

from crc32c import crc32c

from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.lease import Lease
from dayshift.engine.sessions.payload_io import PayloadIO
from dayshift.engine.sessions.record_format import NO_KV, KVFormat, RecordHeader, RecordKind


class RecordWriter:
    """Where the next record of an open file goes, and how it gets there.

    An append is durable when it returns; one that fails leaves the file as it was, or `is_sound`
    false if even that failed. `lease` None: nobody else can write this file. Without `syncs_each` the
    caller makes the whole file durable.
    """

    def __init__(
        self,
        file: io.FileIO,
        payloads: PayloadIO,
        nonce: bytes,
        lease: Lease | None,
        *,
        syncs_each: bool = True,
    ) -> None:
        self.end = 0  # where the next record goes
        self.num_records = 0
        self.is_sound = True
        self.nonce = nonce
        self._file = file
        self._payloads = payloads
        self._lease = lease
        self._syncs_each = syncs_each

    @contextmanager
    def synced_once(self) -> Iterator[None]:
        """Appends in here are durable when it is left; only for a file that has no name yet, because a crash
        may leave any of them."""
        before, self._syncs_each = self._syncs_each, False
        try:
            yield
        finally:
            self._syncs_each = before
        self._sync()

    def skip(self, header: RecordHeader) -> None:
        """Take up a record that stands in the file."""
        self.end = header.next_offset
        self.num_records += 1

    def append(
        self,
        kind: RecordKind,
        payload: memoryview,
        *,
        identity: bytes,
        turn_index: int = -1,
        kv: KVFormat = NO_KV,
    ) -> RecordHeader:
        """Write a record. Raises OSError, and SessionLockedError if the session was taken over."""
        header = RecordHeader(
            kind=kind,
            sequence=self.num_records,
            offset=self.end,
            payload_bytes=len(payload),
            payload_crc=crc32c(payload),
            turn_index=turn_index,
            nonce=self.nonce,
            identity=identity,
            epoch=0 if self._lease is None else self._lease.epoch,
            kv=kv,
        )
        self._check_lease()  # before: a successor's records may stand where this would go
        try:
            self._write(header, payload)
        except BaseException:
            self.is_sound = False
            self._check_lease()  # what stands there now may be a successor's
            self.cut_to_end()
            self.is_sound = True
            raise
        self._check_lease()  # after: a successor that came meanwhile may not have read it
        self.skip(header)
        return header

    def cut_to_end(self) -> None:
        """Drop, durably, what lies behind the last whole record."""
        fd = self._file.fileno()
        if os.fstat(fd).st_size > self.end:
            os.ftruncate(fd, self.end)
            os.fsync(fd)

    def _check_lease(self) -> None:
        if self._lease is not None:
            self._lease.check()

    def _write(self, header: RecordHeader, payload: memoryview) -> None:
        fd = self._file.fileno()
        if not header.is_inline:
            if header.kind is RecordKind.KV:
                self._payloads.write(payload, header.payload_offset)
            else:
                record_format.write_all(fd, payload, header.payload_offset)
            self._sync()  # a header never stands on disk before what it vouches for
        record_format.write_all(fd, memoryview(header.pack_page(payload)), header.offset)
        self._sync()

    def _sync(self) -> None:
        if self._syncs_each:
            os.fdatasync(self._file.fileno())
