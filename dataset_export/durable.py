"""Making files reach the disk, folders change places, and one writer per folder (Linux)."""

from __future__ import annotations

import ctypes
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dayshift.dataset_export.errors import BusyError


def flush_to_disk(path: Path) -> None:
    """fsync a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A recorder that has lost its run notices at once, but has to get a core for it.
LOST_RUN_PATIENCE_S = 30.0


@contextmanager
def only_writer(folder: Path, *, patience_s: float = 5.0) -> Iterator[None]:
    """Be the only process that writes in `folder`; the lock ends with the process, however it ends.

    Waits up to `patience_s` for the writer of a run that was just killed to notice; raises BusyError
    when somebody still writes then.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    give_up_at = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise BusyError(f"{folder}: another process is still writing here") from None
                time.sleep(0.05)
        if not folder.exists() or folder.stat().st_ino != os.fstat(descriptor).st_ino:
            # Whoever held the lock has published the folder under another name meanwhile.
            raise BusyError(f"{folder}: another process has just written here: try again")
        yield
    finally:
        os.close(descriptor)


def has_writer(folder: Path) -> bool:
    """True while a process is inside `only_writer(folder)`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def flush_tree(folder: Path) -> None:
    """fsync every file and directory under `folder`, itself included."""
    for path in folder.rglob("*"):
        flush_to_disk(path)
    flush_to_disk(folder)


_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100


def exchange(one: Path, other: Path) -> None:
    """Let two paths of one file system change places, in one step that no crash can halve.

    Raises OSError, for example where the file system cannot do it (EINVAL).
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    if libc.renameat2(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(one))
    flush_to_disk(one.parent)
