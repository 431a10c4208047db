"""The next version of a dataset, put together beside it, so that a crash can never break it.

Everything is written into a folder beside the dataset; shards that are there already are hard links.
At the end the two folders change places in one system call. So whoever looks, at any moment, sees the
old dataset or the new one, both whole. Appending copies at most one video file per camera.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_files import (
    DatasetMeta,
    empty_folder,
    link_shards,
    staging_folder,
    write_meta,
)
from dayshift.dataset_export.durable import exchange, flush_to_disk, flush_tree, only_writer
from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, first_line, os_errors_explained
from dayshift.dataset_export.shards import EncodedVideo, ShardId, ShardSet, read_encoded
from dayshift.types import DayshiftError

_MB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSizes:
    """When files are full. With `together`, rows and all cameras change files at the same episode."""

    data_file_mb: float = v3.DATA_FILE_MB
    video_file_mb: float = v3.VIDEO_FILE_MB
    together: bool = False


class DatasetDraft:
    """The next version of the dataset in `root`; a context manager only.

    `meta` is where it starts: empty, or the dataset's own, to add to it. Leaving the `with` block
    without `publish`, or being killed in it, leaves the dataset as it was. Raises RecordingError for
    a full disk, or when another process writes the dataset.
    """

    def __init__(self, root: Path, meta: DatasetMeta, video_keys: Sequence[str], sizes: FileSizes) -> None:
        self.root = root
        self.meta = meta
        self.num_frames = sum(row["length"] for row in meta.episodes)
        self._num_old = len(meta.episodes)
        self._video_keys = video_keys
        self._sizes = sizes
        self._stage = staging_folder(root)
        self._shards: ShardSet | None = None
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with os_errors_explained(self.root):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self._stage.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_writer(self._stage))
            stack.callback(shutil.rmtree, self._stage)
            empty_folder(self._stage)  # what a killed export left
            if self._num_old:
                link_shards(self.root, self._stage)
            self._episodes_shard = self.meta.next_shard("meta/episodes")
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._cleanup, contextlib.suppress(OSError):  # what is not published yet is thrown away
            self._finish_shards()

    @property
    def num_added(self) -> int:
        """Episodes added so far."""
        return len(self.meta.episodes) - self._num_old

    def add(
        self,
        table: pa.Table,
        videos: Mapping[str, EncodedVideo],
        row: Mapping[str, Any],
        attempt: Mapping[str, Any],
    ) -> None:
        """Write an episode: its frames, its pictures, its rows in meta/episodes and meta/attempts.

        The columns that say where the episode is are set here, whatever `row` and `attempt` say.
        """
        with os_errors_explained(self.root):
            files = self._open_shards(table.schema).add(table, videos)
        episode_index = len(self.meta.episodes)
        self.meta.episodes.append(
            {
                **row,
                "episode_index": episode_index,
                "length": table.num_rows,
                **files,
                "dataset_from_index": self.num_frames,
                "dataset_to_index": self.num_frames + table.num_rows,
                "meta/episodes/chunk_index": self._episodes_shard.chunk_index,
                "meta/episodes/file_index": self._episodes_shard.file_index,
            }
        )
        self.meta.attempts.append({**attempt, "episode_index": episode_index})
        self.num_frames += table.num_rows

    def publish(self, card: str) -> None:
        """Make the draft the dataset; nothing can be added after it."""
        info = self.meta.info
        info.total_episodes = len(self.meta.episodes)
        info.total_frames = self.num_frames
        info.total_tasks = len(self.meta.tasks)
        info.splits = {"train": f"0:{info.total_episodes}"}
        with os_errors_explained(self.root):
            self._finish_shards()
            write_meta(self._stage, self.meta, self._num_old, card)
            flush_tree(self._stage)
            if self.root.exists():
                exchange(self._stage, self.root)
            else:
                self._stage.rename(self.root)
                self._stage.mkdir()  # for the clean-up
                flush_to_disk(self.root.parent)

    def _open_shards(self, schema: pa.Schema) -> ShardSet:
        if self._shards is None:
            self._shards = ShardSet(
                self._stage,
                schema,
                self._video_keys,
                fps=self.meta.info.fps,
                first=self.meta.next_shard,
                last={} if self._sizes.together else self._last_videos(),
                data_file_bytes=round(self._sizes.data_file_mb * _MB),
                video_file_bytes=round(self._sizes.video_file_mb * _MB),
                together=self._sizes.together,
            )
        return self._shards

    def _last_videos(self) -> dict[str, tuple[ShardId, EncodedVideo]]:
        """The last video file of each camera, as far as there is room in it."""
        last = {}
        for key in self._video_keys if self._num_old else ():
            shards = self.meta.shards(f"videos/{key}")
            shard = max(shards)
            path = shard.path(self.root, v3.VIDEO_PATH, video_key=key)
            num_frames = sum(
                row["length"] for row, place in zip(self.meta.episodes, shards, strict=True) if place == shard
            )
            try:
                if path.stat().st_size < self._sizes.video_file_mb * _MB:
                    last[key] = (shard, read_encoded(path, num_frames=num_frames, fps=self.meta.info.fps))
            except BROKEN_FILE_ERRORS as error:
                raise DayshiftError(
                    f"cannot append to {path}: {first_line(error)}; repair it first"
                ) from error
        return last

    def _finish_shards(self) -> None:
        if self._shards is not None:
            self._shards.finish()
