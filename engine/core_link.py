"""The socket between the HTTP front and the engine core: whole messages, and nobody waits for the other.

On the wire a message is its length in four bytes, least significant first, and then its bytes; or where they
lie in a ring of memory that both sides map, if it is a large one and its way has such a ring. A plain pair of
sockets: a message wakes its reader at once, and no thread stands between them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from struct import Struct

from dayshift.engine.shared_ring import RingReader, RingWriter

_LENGTH = Struct("<I")
_PLACE = Struct("<IQ")  # length with `_IN_RING`, and where in the ring it begins
_IN_RING = 1 << 31
_LARGE_BYTES = 64 << 10  # of a message that goes through the ring
_READ_BYTES = 256 << 10


class CoreLink:
    """One end of the socket. Not thread-safe.

    What the other side is too slow to take is kept, and sent by `flush`. What it will never take, because
    it has ended, is dropped: who has ended is for others to find out.
    """

    def __init__(
        self, end: socket.socket, *, outgoing: RingWriter | None = None, incoming: RingReader | None = None
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._outgoing, self._incoming = outgoing, incoming
        self._unsent = bytearray()
        self._received = bytearray()
        self._buffer = memoryview(bytearray(_READ_BYTES))
        self.is_closed = False
        """The other side has closed its end."""

    def fileno(self) -> int:
        """To wait for: readable when there may be messages, writable when `flush` gets on."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Something waits for the other side to read."""
        return bool(self._unsent)

    def send(self, message: bytes) -> None:
        """Send a message, now if the other side can take it."""
        start = None
        if self._outgoing is not None and len(message) >= _LARGE_BYTES:
            start = self._outgoing.put(message)
        if start is None:
            self._unsent += _LENGTH.pack(len(message))
            self._unsent += message
        else:
            self._unsent += _PLACE.pack(len(message) | _IN_RING, start)
        self.flush()

    def flush(self) -> None:
        """Send as much of what is unsent as the other side takes."""
        try:
            while self._unsent:
                num_sent = self._socket.send(self._unsent)
                del self._unsent[:num_sent]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._unsent.clear()

    @property
    def has_unread(self) -> bool:
        """A whole message has been read from the socket and not been received yet."""
        return len(self._received) >= self._first_bytes()

    def receive(self) -> list[bytes]:
        """The whole messages that have come. It does not wait."""
        return list(iter(partial(self.receive_one, bytes), None))

    def receive_one[T](self, read: Callable[[memoryview], T]) -> T | None:
        """What `read` makes of the next whole message, if that has come. It does not wait.

        What is read from the ring is not copied before: the view is good for the call only.
        """
        if not self.has_unread:
            self._read()
            if not self.has_unread:
                return None
        size = self._first_bytes()
        (length,) = _LENGTH.unpack_from(self._received)
        if not length & _IN_RING:
            message = bytes(self._received[_LENGTH.size : size])
            del self._received[:size]
            return read(memoryview(message))
        length, place = _PLACE.unpack_from(self._received)
        del self._received[:size]
        assert self._incoming is not None, "only who has a ring sends through it"
        return self._incoming.take(place, length ^ _IN_RING, read)

    def _first_bytes(self) -> int:
        """What the first of the received messages takes on the wire; so far as it is known."""
        if len(self._received) < _LENGTH.size:
            return _LENGTH.size
        (length,) = _LENGTH.unpack_from(self._received)
        return _PLACE.size if length & _IN_RING else _LENGTH.size + length

    def _read(self) -> None:
        num_bytes = _READ_BYTES
        while num_bytes == _READ_BYTES:  # less: it was all there is
            try:
                num_bytes = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                return
            except ConnectionError:
                num_bytes = 0
            self.is_closed = num_bytes == 0
            self._received += self._buffer[:num_bytes]

    def close(self, linger_s: float = 0.0) -> None:
        """Close this end, after waiting so long for the other side to take what is unsent."""
        if self._unsent and linger_s:
            self._socket.settimeout(linger_s)
            with suppress(OSError):
                self._socket.sendall(self._unsent)
        self._socket.close()
        for ring in (self._outgoing, self._incoming):
            if ring is not None:
                ring.close()
