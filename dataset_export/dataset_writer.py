"""Writes a LeRobot v3.0 dataset, new or longer, so that a crash can never break it.

Everything is written into a folder beside the dataset; shards that are there already are hard links.
At the end the two folders change places in one system call. So whoever looks, at any moment, sees the
old dataset or the new one, both whole, and appending costs nothing for what is there.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_files import (
    DatasetMeta,
    attempt_keys,
    empty_folder,
    flatten_stats,
    link_shards,
    read_meta,
    staging_folder,
    write_meta,
)
from dayshift.dataset_export.durable import exchange, flush_to_disk, flush_tree, only_writer
from dayshift.dataset_export.episodes import Episode, EpisodePlace, data_table, episode_stats, numeric_columns
from dayshift.dataset_export.errors import os_errors_explained
from dayshift.dataset_export.language import TOOLS
from dayshift.dataset_export.shards import ShardSet
from dayshift.dataset_export.video import H264, Codec
from dayshift.sim.types import CAMERAS, Camera
from dayshift.types import DayshiftError

_MB = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """How a dataset is written."""

    fps: int
    cameras: tuple[Camera, ...] = CAMERAS
    codec: Codec = H264
    language: bool = True  # with the planner's talk
    same_shards: bool = False  # rows and all cameras change files together, so times agree everywhere
    data_file_mb: float = v3.DATA_FILE_MB
    video_file_mb: float = v3.VIDEO_FILE_MB

    @property
    def video_keys(self) -> list[str]:
        """The cameras' names in the dataset."""
        return [v3.VIDEO_KEYS[camera] for camera in self.cameras]

    @property
    def columns(self) -> dict[str, dict[str, Any]]:
        """Features that are columns of the data files."""
        return v3.COLUMNS | (v3.LANGUAGE if self.language else {})


class DatasetWriter:
    """Adds episodes to the dataset in `root`, which may not exist yet. A context manager only.

    Leaving the `with` block publishes all that was added; leaving it by an exception, or being killed
    in it, publishes nothing and leaves the dataset as it was. Raises DayshiftError when the dataset
    there does not go with `spec`, RecordingError when another process writes it.
    """

    def __init__(self, root: Path, spec: DatasetSpec, *, make_card: Callable[[DatasetMeta], str]) -> None:
        self.root = root
        self._spec = spec
        self._make_card = make_card
        self._stage = staging_folder(root)
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self._stage.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(only_writer(self._stage))
            stack.callback(shutil.rmtree, self._stage)
            empty_folder(self._stage)  # what a killed export left
            self._meta = self._open_dataset()
            self._num_old = len(self._meta.episodes)
            self._num_frames = self._meta.info.total_frames
            self._episodes_shard = self._meta.next_shard("meta/episodes")
            self._schema = v3.data_schema(self._spec.columns)
            self._shards = ShardSet(
                self._stage,
                self._schema,
                self._spec.video_keys,
                fps=self._spec.fps,
                first=self._meta.next_shard,
                data_file_bytes=round(self._spec.data_file_mb * _MB),
                video_file_bytes=round(self._spec.video_file_mb * _MB),
                together=self._spec.same_shards,
            )
            self._cleanup = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._cleanup:
            if kind is None:
                with os_errors_explained(self.root):
                    self._publish()
            else:
                with contextlib.suppress(OSError):  # these files are thrown away
                    self._shards.finish()

    @property
    def num_added(self) -> int:
        """Episodes added so far."""
        return len(self._meta.episodes) - self._num_old

    @property
    def known_attempts(self) -> set[tuple[str, str]]:
        """(run, attempt) of every episode in the dataset."""
        return attempt_keys(self._meta.attempts)

    def add_episode(self, episode: Episode) -> None:
        """Write one episode. Raises DayshiftError when it does not go with the dataset or for a full disk."""
        self._check_features(episode)
        place = self._next_place(episode)
        columns = numeric_columns(episode, place)
        encoded = {key: video.encoded for key, video in episode.videos.items()}
        with os_errors_explained(self.root):
            shards = self._shards.add(data_table(episode, columns, self._schema), encoded)
        facts = asdict(episode.facts)
        self._meta.episodes.append(
            {
                "episode_index": place.episode_index,
                "tasks": [episode.facts.instruction],
                "length": episode.length,
                **shards,
                "dataset_from_index": place.first_index,
                "dataset_to_index": place.first_index + episode.length,
                **facts,
                **flatten_stats(episode_stats(episode, columns)),
                "meta/episodes/chunk_index": self._episodes_shard.chunk_index,
                "meta/episodes/file_index": self._episodes_shard.file_index,
            }
        )
        digests: dict[str, str] = {}
        for key, video in episode.videos.items():
            digests |= {f"first/{key}": video.first_digest, f"last/{key}": video.last_digest}
        self._meta.attempts.append({"episode_index": place.episode_index, **facts, **digests})
        self._num_frames += episode.length

    def _check_features(self, episode: Episode) -> None:
        """The first episode says how large the pictures are; all others have to agree."""
        features = dict(self._spec.columns)
        for key, video in episode.videos.items():
            features[key] = v3.video_feature(
                height=video.encoded.height,
                width=video.encoded.width,
                fps=self._spec.fps,
                codec=self._spec.codec,
            )
        known = self._meta.info.features = self._meta.info.features or features
        if known != features:
            name = next(name for name in known | features if known.get(name) != features.get(name))
            raise DayshiftError(
                f"{self.root}: {name} of attempt {episode.facts.attempt_id} does not go with the dataset's: "
                f"{features.get(name)}, expected {known.get(name)}"
            )

    def _next_place(self, episode: Episode) -> EpisodePlace:
        task = episode.facts.instruction
        if task not in self._meta.tasks:
            self._meta.tasks.append(task)
        return EpisodePlace(
            episode_index=len(self._meta.episodes),
            first_index=self._num_frames,
            task_index=self._meta.tasks.index(task),
            fps=self._spec.fps,
        )

    def _open_dataset(self) -> DatasetMeta:
        if not self.root.exists():
            info = v3.DatasetInfo(
                codebase_version=v3.VERSION,
                fps=self._spec.fps,
                features={},
                robot_type=v3.ROBOT_TYPE,
                video_path=v3.VIDEO_PATH if self._spec.cameras else None,
                tools=TOOLS if self._spec.language else None,
            )
            return DatasetMeta(info=info, tasks=[], episodes=[], attempts=[])
        meta = read_meta(self.root)
        if len(meta.attempts) != len(meta.episodes):
            raise DayshiftError(f"{self.root}: another tool has edited this dataset; export to a new folder")
        if meta.info.fps != self._spec.fps:
            raise DayshiftError(f"{self.root}: has {meta.info.fps} fps, the attempts {self._spec.fps}")
        link_shards(self.root, self._stage)
        return meta

    def _publish(self) -> None:
        self._shards.finish()
        if not self.num_added:
            return
        info = self._meta.info
        info.total_episodes = len(self._meta.episodes)
        info.total_frames = self._num_frames
        info.total_tasks = len(self._meta.tasks)
        info.splits = {"train": f"0:{info.total_episodes}"}
        write_meta(self._stage, self._meta, self._num_old, self._make_card(self._meta))
        flush_tree(self._stage)
        if self.root.exists():
            exchange(self._stage, self.root)
        else:
            self._stage.rename(self.root)
            self._stage.mkdir()  # for the clean-up
            flush_to_disk(self.root.parent)
