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
from dayshift.engine.sessions.leftovers import PROBE_PREFIX
from dayshift.engine.sessions.record_format import PAGE_BYTES

_BOUNCE_BYTES = 8 << 20
_CANNOT = (errno.EINVAL, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def can_direct(folder: Path) -> bool:
    """Whether files of this folder can be read and written without the page cache (O_DIRECT).

    A full disk cannot be asked: then not, and what is stored can be read all the same. Raises OSError where
    nothing can be written for another reason.
    """
    probe = folder / f"{PROBE_PREFIX}{os.getpid()}-{threading.get_ident()}"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in _CANNOT:
            probe.unlink(missing_ok=True)  # some file systems create the file and then refuse
            return False
        raise
    try:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            return os.pwrite(fd, page, 0) == PAGE_BYTES
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    finally:
        os.close(fd)
        probe.unlink()


class PayloadIO:
    """The KV payloads of one open session file, which is opened a second time for them.

    `is_direct`: for direct access. `deadline_s` is the longest wait for one payload. Reads may run in any
    thread; all else is for one thread at a time.
    """

    def __init__(self, file: io.FileIO, *, is_direct: bool, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._is_direct = is_direct
        mode = (os.O_RDWR if file.writable() else os.O_RDONLY) | (os.O_DIRECT if is_direct else 0)
        # Not by its name, which may be another file's by now. And not the file's own descriptor: a read that
        # hangs would keep the session's lock after the session is closed.
        self._fd: int | None = os.open(f"/proc/self/fd/{file.fileno()}", mode | os.O_CLOEXEC)
        self._closing = threading.Lock()  # a number that is closed may be another file's a moment later

    def close(self) -> None:
        """Close what this opened. Reads that run go on; those that begin later raise OSError."""
        with self._closing:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def descriptor(self) -> int:
        """A descriptor of its own for a read, to be closed after it. Raises OSError once this is closed."""
        with self._closing:
            if self._fd is None:
                raise OSError(errno.EBADF, "the session was closed")
            return os.dup(self._fd)

    def write(self, payload: memoryview, offset: int) -> None:
        """Write a payload at a page's start; with direct access the page's rest is filled with zeros."""
        assert self._fd is not None, "open until the session is closed"
        if not self._is_direct:
            record_format.write_all(self._fd, payload, offset)
            return
        with mmap.mmap(-1, min(_whole_pages(len(payload)), _BOUNCE_BYTES) or PAGE_BYTES) as bounce:
            for start in range(0, len(payload), _BOUNCE_BYTES):
                part = payload[start : start + _BOUNCE_BYTES]
                num_bytes = _whole_pages(len(part))
                bounce[: len(part)] = part
                bounce[len(part) : num_bytes] = bytes(num_bytes - len(part))
                with memoryview(bounce) as view, view[:num_bytes] as data:
                    record_format.write_all(self._fd, data, offset + start)


class PayloadRead:
    """One read of a payload. `run` it in any thread, once; `give_up` may come from another one."""

    def __init__(self, payloads: PayloadIO, num_bytes: int, offset: int) -> None:
        self._payloads = payloads
        self._num_bytes = num_bytes
        self._inset = offset % PAGE_BYTES  # a short payload stands behind its header, in the same page
        self._offset = offset - self._inset
        self._is_over = threading.Event()
        self._error: OSError | EOFError | None = None

    def run(self) -> NDArray[np.uint8]:
        """The payload, uint8 (num_bytes,).

        Raises TimeoutError after the deadline, EOFError if the file ends before, OSError; also if it was
        given up.
        """
        if not self._is_over.is_set():
            # A read that hangs cannot be called back: its thread is left to it, with all that it uses.
            buffer = mmap.mmap(-1, _whole_pages(self._inset + self._num_bytes) or PAGE_BYTES)
            arguments = (self._payloads.descriptor(), buffer)
            threading.Thread(target=self._read, args=arguments, daemon=True, name="dayshift-kv-read").start()
            if not self._is_over.wait(self._payloads.deadline_s):
                raise TimeoutError(f"no answer to a read within {self._payloads.deadline_s:g} s")
            if self._error is None:
                return np.frombuffer(buffer, np.uint8, self._num_bytes, self._inset)
        raise self._error or OSError(errno.ECANCELED, "nobody waits for it any more")

    def give_up(self) -> None:
        """Let `run` raise OSError now, if it is not over."""
        if not self._is_over.is_set():
            self._error = OSError(errno.ECANCELED, "nobody waits for it any more")
            self._is_over.set()

    def _read(self, fd: int, buffer: mmap.mmap) -> None:
        try:
            # Whole pages are asked for, as direct access needs it; the file may end within the last.
            num_needed = self._inset + self._num_bytes
            record_format.read_all(fd, memoryview(buffer), self._offset, num_needed)
        except (OSError, EOFError) as error:
            self._error = error
        finally:
            os.close(fd)
            self._is_over.set()


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
