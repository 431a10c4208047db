"""Errors of recording and export; each is one line for the user."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dayshift.types import DayshiftError

# What reading a recording's or a dataset's files raises when they are missing, cut off or spoilt.
BROKEN_FILE_ERRORS = (OSError, ValueError, EOFError, KeyError, msgspec.DecodeError)


class RecordingError(DayshiftError):
    """Recording cannot go on: full disk, dead writer process, frames out of order."""


class BusyError(RecordingError):
    """Another process writes there now."""


def describe_os_error(error: OSError, path: Path) -> str:
    """One line that says what the system refused, and where."""
    if error.errno == errno.ENOSPC:
        return f"disk full while writing {path}: free some space, then resume the run"
    return f"cannot write {path}: {error.strerror or error}"


def raise_if_disk_full(error: Exception, path: Path) -> None:
    """A full disk is no broken file: no other attempt would fare better. Raises RecordingError."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        raise RecordingError(describe_os_error(error, path)) from error


def first_line(error: Exception) -> str:
    """What a library says about a broken file, without the file's name and in one line."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^Could not open Parquet input source '[^']*': ", "", lines[0])


@contextmanager
def os_errors_explained(path: Path) -> Iterator[None]:
    """Turn an OSError into a RecordingError of one line."""
    try:
        yield
    except OSError as error:
        raise RecordingError(describe_os_error(error, path)) from error
