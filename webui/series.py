"""Numbers over time: appended to files while a run goes on, read by window and pixel width.

    runs/<id>/series/<name>.f64     (t, value) pairs, float64, little endian; t on the run clock

A kill leaves at most half a pair at the end of a file, which readers ignore and writers cut off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

FOLDER = "series"
_SUFFIX = ".f64"
_PAIR_BYTES = 16
_FOLD = 4  # points of one level that become one point of the next

Floats = NDArray[np.float64]


class SeriesWriter:
    """Appends samples to a run's series. Not thread-safe; use as a context manager."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._folder.mkdir(exist_ok=True)
        self._files: dict[str, int] = {}

    def append(self, t: float, values: Mapping[str, float]) -> None:
        """One sample of each series at `t` seconds on the run clock. Raises OSError."""
        for name, value in values.items():
            if name not in self._files:
                self._files[name] = self._open(name)
            os.write(self._files[name], np.array((t, value), "<f8").tobytes())

    def _open(self, name: str) -> int:
        path = self._folder / f"{name}{_SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, size - size % _PAIR_BYTES)
        return descriptor

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pyramid:
    """A growing series with the minimum and maximum of 4, 16, 64 … neighbouring points kept beside it."""

    def __init__(self) -> None:
        self._levels: list[_Level] = [_Level()]

    def __len__(self) -> int:
        return len(self._levels[0])

    def extend(self, t: Floats, values: Floats) -> None:
        """Append points; `t` (n,) must not fall."""
        self._levels[0].append(t, values, values)
        for depth in range(1, 32):
            below = self._levels[depth - 1]
            if depth == len(self._levels):
                if len(below) < _FOLD:
                    return
                self._levels.append(_Level())
            level = self._levels[depth]
            level.append(*below.folded(from_point=len(level) * _FOLD))

    def window(self, from_s: float, to_s: float, width: int) -> tuple[Floats, Floats, Floats]:
        """(t, low, high) of the points in [from_s, to_s] and one neighbour on each side.

        Of the finest level with about two points per pixel of `width`.
        """
        depth = 0
        first, last = self._levels[0].range(from_s, to_s)
        while last - first > 2 * width and depth + 1 < len(self._levels):
            depth += 1
            first, last = self._levels[depth].range(from_s, to_s)
        pieces = [self._levels[depth].slice(first, last)]
        # The youngest points have no whole group yet: they come from the finer levels.
        for finer in reversed(range(depth)):
            first, last = self._levels[finer].range(from_s, to_s)
            first = max(first, len(self._levels[finer + 1]) * _FOLD)
            pieces.append(self._levels[finer].slice(first, max(first, last)))
        t, low, high = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        return t, low, high


class _Level:
    """Points of one level of detail, in arrays that double when they are full."""

    def __init__(self) -> None:
        self._points = np.empty((3, 256))  # rows: time of the first point, minimum, maximum
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def append(self, t: Floats, low: Floats, high: Floats) -> None:
        end = self._num + len(t)
        if end > self._points.shape[1]:
            grown = np.empty((3, max(end, 2 * self._points.shape[1])))
            grown[:, : self._num] = self._points[:, : self._num]
            self._points = grown
        self._points[:, self._num : end] = (t, low, high)
        self._num = end

    def folded(self, from_point: int) -> tuple[Floats, Floats, Floats]:
        """The whole groups of points from `from_point` on, each as one point."""
        num_groups = (self._num - from_point) // _FOLD
        groups = self._points[:, from_point : from_point + num_groups * _FOLD].reshape(3, num_groups, _FOLD)
        return groups[0, :, 0], groups[1].min(axis=1), groups[2].max(axis=1)

    def range(self, from_s: float, to_s: float) -> tuple[int, int]:
        t = self._points[0, : self._num]
        first = int(np.searchsorted(t, from_s, "left")) - 1
        last = int(np.searchsorted(t, to_s, "right")) + 1
        return max(0, first), min(self._num, last)

    def slice(self, first: int, last: int) -> tuple[Floats, Floats, Floats]:
        t, low, high = self._points[:, first:last]
        return t, low, high


class SeriesReader:
    """All series of a run; `refresh` reads what was appended since."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._pyramids: dict[str, Pyramid] = {}

    def refresh(self) -> bool:
        """True when something was appended."""
        if not self._folder.is_dir():
            return False
        has_grown = False
        for path in self._folder.glob(f"*{_SUFFIX}"):
            pyramid = self._pyramids.setdefault(path.stem, Pyramid())
            num_new = path.stat().st_size // _PAIR_BYTES - len(pyramid)
            if num_new > 0:
                offset = len(pyramid) * _PAIR_BYTES
                pairs = np.fromfile(path, "<f8", count=2 * num_new, offset=offset).reshape(-1, 2)
                pyramid.extend(pairs[:, 0], pairs[:, 1])
                has_grown = True
        return has_grown

    @property
    def names(self) -> list[str]:
        return sorted(self._pyramids)

    def window(self, name: str, from_s: float, to_s: float, width: int) -> tuple[Floats, Floats, Floats]:
        """See `Pyramid.window`. Raises KeyError for a series that this run does not have."""
        return self._pyramids[name].window(from_s, to_s, width)
