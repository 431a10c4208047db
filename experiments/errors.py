"""Unexpected exceptions become one line and a file with the traceback."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dayshift.types import DayshiftError

_LONGEST_SUMMARY = 200  # characters of the exception's own text


class InternalError(DayshiftError):
    """A defect of the program, told in one line that names the file with the traceback."""


class StoppedByUserError(DayshiftError):
    """Ctrl-C, or a request to terminate, ended a run that can be resumed; the process exits with 130."""


@contextmanager
def traceback_kept_in(folder: Path | None = None) -> Iterator[None]:
    """Turns an unexpected exception into an InternalError; the traceback goes to `folder`.

    Without a folder, or when it cannot be written, the traceback goes to a temporary file.
    """
    try:
        yield
    except DayshiftError:
        raise
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")[:_LONGEST_SUMMARY]
        summary = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
        path = _write(traceback.format_exc(), folder)
        raise InternalError(f"internal error: {summary} (traceback in {path})") from error


def _write(text: str, folder: Path | None) -> Path:
    if folder is not None:
        path = folder / "traceback.log"
        try:
            path.write_text(text, encoding="utf-8")
        except OSError:  # a full disk may be what is being reported
            return _write(text, None)
        return path
    with tempfile.NamedTemporaryFile("w", prefix="dayshift-", suffix=".log", delete=False) as file:
        file.write(text)
    return Path(file.name)
