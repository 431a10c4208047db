"""Who may write a session: a lease with an epoch, in a file beside the session's own.

Whoever opens a session raises its epoch by one. A writer whose epoch is no longer the file's has been
replaced while it hung, or lost its lock; it is refused before and after each write, so that what it
acknowledges was written before its successor read the session.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crc32c import crc32c

from dayshift.engine.api import SessionLockedError

_LEASE = struct.Struct("<4sQI")  # magic, epoch, CRC32C of the bytes before it
_MAGIC = b"DSSL"


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write a session until somebody raises its epoch. Made by `LeaseFile.raise_epoch`."""

    file: LeaseFile
    epoch: int

    def check(self) -> None:
        """Raises SessionLockedError if the session was taken over."""
        found = self.file.epoch()
        if found != self.epoch:
            raise SessionLockedError(
                "the session was taken over by another engine "
                f"(epoch {found if found is not None else 'unknown'}, this writer's is {self.epoch})",
                self.file.path,
            )


@dataclass(frozen=True, slots=True)
class LeaseFile:
    """The file that holds a session's epoch."""

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else opens or takes over the session meanwhile. Raises SessionLockedError."""
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SessionLockedError("the session is being opened elsewhere", self.path) from error
            yield
        finally:
            os.close(fd)

    def epoch(self) -> int | None:
        """The epoch in the file; None if there is none, or it is damaged."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != _LEASE.size:
            return None
        magic, epoch, checksum = _LEASE.unpack(data)
        return epoch if (magic, checksum) == (_MAGIC, crc32c(data[:-4])) else None

    def raise_epoch(self, last_known: int) -> Lease:
        """A new lease, durable when this returns; the caller holds `locked`.

        `last_known` is the last epoch that wrote the session, for when the lease file was lost.
        """
        epoch = max(self.epoch() or 0, last_known) + 1
        fields = struct.pack("<4sQ", _MAGIC, epoch)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(fd, fields + struct.pack("<I", crc32c(fields)), 0)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        return Lease(self, epoch)
