"""Large messages from one process to another through memory that both map: one writer, one reader, in order.

A socket takes some 200 kB at a time, and each of its two sides waits for the other to wake up: 32 robots that
send two camera images each would take longer to be read than to be answered. Here a message is copied in once
and read there; where it lies is told by other means, such as a socket, which also keeps the order.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from struct import Struct

RING_BYTES = 64 << 20

_POSITION = Struct("<Q")
_FIRST = 64  # byte behind the reader's position


class RingWriter:
    """The end that messages are put into. Positions count the bytes since the start."""

    def __init__(self, file: int, capacity: int) -> None:
        self._map, self._capacity = mmap.mmap(file, _FIRST + capacity), capacity
        self._next = self._oldest = 0  # position of the next message, and of the oldest that was not taken

    def put(self, message: bytes) -> int | None:
        """Where the message begins, for `RingReader.take`; None if it finds no room now."""
        start, size = self._next, len(message)
        if size > self._capacity:
            return None
        (taken,) = _POSITION.unpack_from(self._map)
        self._oldest = max(self._oldest, taken)
        is_empty = self._oldest == start
        # In one piece. What is empty begins at its start again: few pages are in use, and they are warm.
        if is_empty or start % self._capacity + size > self._capacity:
            start = -(-start // self._capacity) * self._capacity
        if is_empty:
            self._oldest = start
        if start + size - self._oldest > self._capacity:
            return None
        place = _FIRST + start % self._capacity
        self._map[place : place + size] = message
        self._next = start + size
        return start

    def close(self) -> None:
        """Unmap this end."""
        self._map.close()


class RingReader:
    """The end that messages are taken from, each once and in order."""

    def __init__(self, file: int, capacity: int) -> None:
        self._map, self._capacity = mmap.mmap(file, _FIRST + capacity), capacity

    def take[T](self, start: int, size: int, read: Callable[[memoryview], T]) -> T:
        """What `read` makes of the message that begins there, whose room is used again afterwards: nothing
        that is kept may be a view of it."""
        place = _FIRST + start % self._capacity
        try:
            with memoryview(self._map) as whole, whole[place : place + size] as message:
                return read(message)
        finally:
            _POSITION.pack_into(self._map, 0, start + size)

    def close(self) -> None:
        """Unmap this end."""
        self._map.close()


def offer_ring(end: socket.socket, capacity: int = RING_BYTES) -> RingWriter:
    """A ring whose other end `accept_ring` gets at the other end of a Unix socket: the first thing there."""
    file = _anonymous_file()
    try:
        os.ftruncate(file, _FIRST + capacity)
        socket.send_fds(end, [_POSITION.pack(capacity)], [file])
        return RingWriter(file, capacity)
    finally:
        os.close(file)


def accept_ring(end: socket.socket) -> RingReader:
    """See `offer_ring`. Waits for it; raises ConnectionError if the other side has ended."""
    message, files, _, _ = socket.recv_fds(end, _POSITION.size, 1)
    if not files:
        raise ConnectionError("the other side ended before it shared its memory")
    try:
        return RingReader(files[0], *_POSITION.unpack(message))
    finally:
        os.close(files[0])


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dayshift-ring")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
