"""Files of one JSON value per line: appended to while a run goes on, read on from where one was.

A kill leaves at most half a line at the end, which readers ignore and writers cut off.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

import msgspec

_CUT_BYTES = 1 << 20  # no line is longer


class LinesWriter:
    """Appends values to a file. Not thread-safe; use as a context manager."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        tail = os.pread(self._file, _CUT_BYTES, max(0, size - _CUT_BYTES))
        os.ftruncate(self._file, size - (len(tail) - (tail.rfind(b"\n") + 1)))

    def append(self, *values: msgspec.Struct) -> None:
        """Write values, each as a line. Raises OSError."""
        if values:
            os.write(self._file, b"".join(msgspec.json.encode(value) + b"\n" for value in values))

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LinesReader[T]:
    """Reads a file's values, which are all of `kind`; `read_new` goes on where the last call ended."""

    def __init__(self, path: Path, kind: Any) -> None:
        self._path = path
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._offset = 0
        self._seen_size = 0

    def has_grown(self) -> bool:
        """Whether something was appended since this was last asked."""
        size = self._size()
        has_grown, self._seen_size = size > self._seen_size, size
        return has_grown

    def read_new(self) -> list[T]:
        """What was appended since; nothing while there is no file."""
        if self._size() <= self._offset:
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return self._decoder.decode_lines(whole)

    def _size(self) -> int:
        return self._path.stat().st_size if self._path.is_file() else 0
