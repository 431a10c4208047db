"""One picture of a dataset, decoded at its exact time."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Self

from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, first_line
from dayshift.dataset_export.looking.dataset import Dataset
from dayshift.dataset_export.video import Image, VideoReader
from dayshift.types import DayshiftError

_MAX_OPEN_VIDEOS = 16


class DatasetPictures:
    """Pictures of one dataset, for any thread. A context manager that closes the videos it opened."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._lock = threading.Lock()
        self._videos: OrderedDict[Path, VideoReader] = OrderedDict()

    def picture(self, camera: str, episode_index: int, frame_index: int) -> Image:
        """The picture of a frame, RGB. Raises DayshiftError when it is not there or its video is broken."""
        part = self._dataset.video(camera, episode_index)
        if not 0 <= frame_index < part.num_frames:
            raise DayshiftError(
                f"episode {episode_index}: no frame {frame_index}, allowed: 0 to {part.num_frames - 1}"
            )
        with self._lock:
            try:
                return self._open(part.path).frame(part.first + frame_index)
            except BROKEN_FILE_ERRORS as error:
                raise DayshiftError(f"{part.path}: {first_line(error)}") from error

    def is_as_recorded(self, camera: str, episode_index: int) -> bool | None:
        """Whether the first and the last picture have the hashes kept of them; None where none were kept."""
        kept = self._dataset.digests(camera, episode_index)
        if kept is None:
            return None
        part = self._dataset.video(camera, episode_index)
        with self._lock:
            try:
                video = self._open(part.path)
                return kept == (video.digest(part.first), video.digest(part.first + part.num_frames - 1))
            except BROKEN_FILE_ERRORS:
                return False

    def _open(self, path: Path) -> VideoReader:
        if path not in self._videos:
            self._videos[path] = VideoReader(path, fps=self._dataset.fps)
        self._videos.move_to_end(path)
        if len(self._videos) > _MAX_OPEN_VIDEOS:
            self._videos.popitem(last=False)[1].__exit__()
        return self._videos[path]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._videos:
            self._videos.popitem()[1].__exit__()
