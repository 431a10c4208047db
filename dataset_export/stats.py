"""Statistics of episodes and of a dataset, as LeRobot keeps them.

Each feature has min, max, mean, std, count and five quantiles per component; pictures have them per
channel, scaled to [0, 1], shape (3, 1, 1). A dataset's statistics are the aggregate of its episodes':
a quantile is the mean of the episodes' quantiles, weighted by their counts (LeRobot's rule).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Stats = dict[str, NDArray[Any]]  # "min", "max", "mean", "std", "count", "q01" …

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
STAT_NAMES = ("min", "max", "mean", "std", "count", *QUANTILES)


class PictureCounts(msgspec.Struct):
    """How often each channel value occurs in a camera's pictures: all that statistics need.

    Counted while the pictures are at hand, so that no export decodes a video to get them; of every
    second pixel each way, which costs a fifth of encoding the picture.
    """

    num_pictures: int = 0
    counts: list[list[int]] = msgspec.field(default_factory=lambda: [[0] * 256 for _ in range(3)])


class PictureCounter:
    """Counts the channel values of pictures as they come."""

    def __init__(self) -> None:
        self._num_pictures = 0
        self._counts = np.zeros((3, 256), np.int64)

    def add(self, image: NDArray[np.uint8]) -> None:
        """Count one picture, (height, width, 3)."""
        self._num_pictures += 1
        for channel in range(3):
            self._counts[channel] += np.bincount(image[::2, ::2, channel].ravel(), minlength=256)

    def write(self, path: Path) -> None:
        """Keep the counts beside the video."""
        counted = PictureCounts(self._num_pictures, self._counts.tolist())
        path.write_bytes(msgspec.json.encode(counted))


def read_picture_stats(path: Path) -> Stats:
    """Statistics of one camera's pictures from their counts."""
    counted = msgspec.json.decode(path.read_bytes(), type=PictureCounts)
    counts = np.array(counted.counts, np.int64)  # (3, 256)
    levels = np.arange(256) / 255.0
    num_pixels = counts.sum(axis=1)
    mean = counts @ levels / num_pixels
    stats = {
        "min": levels[(counts > 0).argmax(axis=1)],
        "max": levels[255 - (counts[:, ::-1] > 0).argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(0.0, counts @ levels**2 / num_pixels - mean**2)),
    }
    below = counts.cumsum(axis=1)
    for name, share in QUANTILES.items():
        stats[name] = levels[(below >= np.ceil(share * num_pixels)[:, None]).argmax(axis=1)]
    shaped = {name: value.reshape(3, 1, 1) for name, value in stats.items()}
    return shaped | {"count": np.array([counted.num_pictures])}


def column_stats(column: NDArray[Any]) -> Stats:
    """Statistics of a numeric feature, (n,) or (n, size)."""
    values = column.reshape(len(column), -1).astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(values)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def aggregate(episodes: Sequence[Mapping[str, Stats]]) -> dict[str, Stats]:
    """Statistics of a dataset from those of its episodes, feature by feature."""
    return {
        feature: _aggregate_feature([episode[feature] for episode in episodes]) for feature in episodes[0]
    }


def _aggregate_feature(episodes: list[Stats]) -> Stats:
    def stack(name: str) -> NDArray[Any]:
        return np.stack([episode[name] for episode in episodes])

    mean, count = stack("mean"), stack("count")
    total = count.sum(axis=0)
    weight = (count / total).reshape(-1, *[1] * (mean.ndim - 1))
    total_mean = (mean * weight).sum(axis=0)
    variance = ((stack("std") ** 2 + (mean - total_mean) ** 2) * weight).sum(axis=0)
    return {
        "min": stack("min").min(axis=0),
        "max": stack("max").max(axis=0),
        "mean": total_mean,
        "std": np.sqrt(variance),
        "count": total,
        **{name: (stack(name) * weight).sum(axis=0) for name in QUANTILES},
    }
