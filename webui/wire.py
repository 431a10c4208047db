"""Messages on the local socket between a run and the page's process, as length-prefixed msgpack.

The run listens in its own folder (`live.sock`); pages connect. The socket's file mode keeps other
users of the machine out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

SOCKET = "live.sock"
LENGTH_BYTES = 4


class Hello(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The first message to a page."""

    t: float  # seconds on the run clock, now
    engine_url: str | None
    process_id: int  # SIGTERM stops the run in order; SIGINT may be blocked or ignored in it


class Told(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An event; `body` holds its fields. Durable facts are in the database by then."""

    kind: str
    t: float
    robot: str
    body: dict[str, Any]


class Pictures(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A robot's pictures, RGB, uint8, rows one after the other. Slow pages miss older ones."""

    t: float
    robot: str
    attempt_id: str
    index: int
    images: dict[str, tuple[int, int, bytes]]  # camera -> height, width, pixels


FromRun = Hello | Told | Pictures

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromRun)


def encode(message: FromRun) -> bytes:
    """Length and message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def decode(body: bytes) -> FromRun:
    """A message without its length."""
    return _decoder.decode(body)


@contextmanager
def socket_address(run_dir: Path) -> Iterator[str]:
    """A path of the run's socket that is short enough for the kernel (107 bytes), however deep the folder."""
    descriptor = os.open(run_dir, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)
