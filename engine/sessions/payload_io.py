"""Reads and writes of KV payloads: past the page cache where the file system can, and never for ever.

KV is written once and read at most a few times, so it would only push other files out of the page
cache; the engine keeps its own tier of host memory. A read that does not come within its deadline (a
hung network file system) is given up: the KV is computed again.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dayshift.engine.sessions import record_format
from dayshift.engine.sessions.record_format import PAGE_BYTES

_BOUNCE_BYTES = 8 << 20


def can_direct(folder: Path) -> bool:
    """Whether files of this folder can be read and written without the page cache (O_DIRECT)."""
    probe = folder / f".direct-{os.getpid()}-{threading.get_ident()}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.EINVAL:
            probe.unlink(missing_ok=True)  # some file systems create the file and then refuse
            return False
        raise
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.pwrite(fd, page, 0) == PAGE_BYTES
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    finally:
        os.close(fd)
        probe.unlink()


class PayloadIO:
    """The KV payloads of one open session file.

    `is_direct`: the file is opened a second time, for direct access. `deadline_s` is the longest wait
    for one payload.
    """

    def __init__(self, file: io.FileIO, *, is_direct: bool, deadline_s: float) -> None:
        self._fd = file.fileno()
        self._deadline_s = deadline_s
        self._direct_fd: int | None = None
        if is_direct:
            flags = os.O_RDWR if file.writable() else os.O_RDONLY
            # Not by its name, which may be another file's by now.
            self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", flags | os.O_DIRECT | os.O_CLOEXEC)

    def close(self) -> None:
        """Close what this opened."""
        if self._direct_fd is not None:
            os.close(self._direct_fd)
            self._direct_fd = None

    def write(self, payload: memoryview, offset: int) -> None:
        """Write a payload at a page's start; with direct access the page's rest is filled with zeros."""
        if self._direct_fd is None:
            record_format.write_all(self._fd, payload, offset)
            return
        with mmap.mmap(-1, min(_whole_pages(len(payload)), _BOUNCE_BYTES) or PAGE_BYTES) as bounce:
            for start in range(0, len(payload), _BOUNCE_BYTES):
                part = payload[start : start + _BOUNCE_BYTES]
                num_bytes = _whole_pages(len(part))
                bounce[: len(part)] = part
                bounce[len(part) : num_bytes] = bytes(num_bytes - len(part))
                with memoryview(bounce) as view, view[:num_bytes] as data:
                    record_format.write_all(self._direct_fd, data, offset + start)

    def read(self, num_bytes: int, offset: int) -> NDArray[np.uint8]:
        """A payload, uint8 (num_bytes,).

        Raises TimeoutError after the deadline, EOFError if the file ends before, OSError.
        """
        is_aligned = offset % PAGE_BYTES == 0  # a short payload stands behind its header, in the same page
        fd = self._direct_fd if self._direct_fd is not None and is_aligned else self._fd
        reading = _Reading(fd, num_bytes, offset)
        # A read that hangs cannot be called back: its thread is left to it, with a buffer of its own.
        threading.Thread(target=reading.run, daemon=True, name="dayshift-kv-read").start()
        if not reading.is_done.wait(self._deadline_s):
            raise TimeoutError(f"no answer to a read within {self._deadline_s:g} s")
        if reading.error is not None:
            raise reading.error
        return np.frombuffer(reading.buffer, np.uint8, num_bytes)


class _Reading:
    """One read of a payload, in a thread."""

    def __init__(self, fd: int, num_bytes: int, offset: int) -> None:
        self.buffer = mmap.mmap(-1, _whole_pages(num_bytes) or PAGE_BYTES)
        self.is_done = threading.Event()
        self.error: OSError | EOFError | None = None
        self._fd, self._num_bytes, self._offset = fd, num_bytes, offset

    def run(self) -> None:
        try:
            # Whole pages are asked for, as direct access needs it; the file may end within the last.
            record_format.read_all(self._fd, memoryview(self.buffer), self._offset, self._num_bytes)
        except (OSError, EOFError) as error:
            self.error = error
        finally:
            self.is_done.set()


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
