"""Episodes with their images in one file, so that what was rendered once is not rendered again.

Several trainings share the file, also on a machine that has no simulator. Images are kept as JPEG with the
side that the policy sees.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dayshift.policy.training.episodes import Episode

_QUALITY = 92  # of a JPEG; colours are not subsampled


def write_episodes(episodes: Iterable[Episode], path: Path, *, image_side: int) -> int:
    """Write them, whole or not at all; their number. Images must be a multiple of `image_side` wide."""
    arrays: dict[str, Any] = {}
    number = 0
    for number, episode in enumerate(episodes, start=1):
        images = _reduced(episode.images, image_side)
        files = [_jpeg(view) for view in images.reshape(-1, *images.shape[2:])]
        arrays |= {
            f"{number}/sentence": np.array(episode.sentence),
            f"{number}/image_steps": episode.image_steps,
            f"{number}/images_shape": np.array(images.shape),
            f"{number}/file_sizes": np.array([len(file) for file in files]),
            f"{number}/files": np.frombuffer(b"".join(files), dtype=np.uint8),
            f"{number}/states": episode.states,
            f"{number}/actions": episode.actions,
            f"{number}/is_disturbed": episode.is_disturbed,
        }
    draft = path.with_suffix(".unfinished")
    with draft.open("wb") as file:
        np.savez(file, num_episodes=np.array(number), **arrays)
    draft.rename(path)
    return number


def read_episodes(path: Path) -> Iterator[Episode]:
    """In the order in which they were written."""
    with np.load(path) as arrays:
        for number in range(1, int(arrays["num_episodes"]) + 1):
            ends = np.cumsum(arrays[f"{number}/file_sizes"])
            files = np.split(arrays[f"{number}/files"], ends[:-1])
            views = [_pixels(file) for file in files]
            yield Episode(
                sentence=str(arrays[f"{number}/sentence"]),
                image_steps=arrays[f"{number}/image_steps"],
                images=np.stack(views).reshape(arrays[f"{number}/images_shape"]),
                states=arrays[f"{number}/states"],
                actions=arrays[f"{number}/actions"],
                is_disturbed=arrays[f"{number}/is_disturbed"],
            )


def _reduced(images: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """(…, channels, n * side, n * side) -> (…, channels, side, side): means of n x n pixels."""
    factor = images.shape[-1] // side
    blocks = images.reshape(*images.shape[:-2], side, factor, side, factor)
    return blocks.mean(axis=(-3, -1)).round().astype(np.uint8)


def _jpeg(view: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(view.transpose(1, 2, 0)).save(file, "JPEG", quality=_QUALITY, subsampling=0)
    return file.getvalue()


def _pixels(file: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(channels, side, side)."""
    return np.asarray(Image.open(io.BytesIO(file.tobytes()))).transpose(2, 0, 1)
