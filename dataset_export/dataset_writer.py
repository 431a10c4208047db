"""Writes attempts as episodes of a LeRobot v3.0 dataset, new or longer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_draft import DatasetDraft, FileSizes
from dayshift.dataset_export.dataset_files import DatasetMeta, attempt_keys, flatten_stats, read_meta
from dayshift.dataset_export.episodes import Episode, EpisodePlace, data_table, episode_stats, numeric_columns
from dayshift.dataset_export.language import TOOLS
from dayshift.dataset_export.video import H264, Codec
from dayshift.sim.types import CAMERAS, Camera
from dayshift.types import DayshiftError


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSpec:
    """What a dataset holds."""

    fps: int
    cameras: tuple[Camera, ...] = CAMERAS
    codec: Codec = H264
    language: bool = True  # with the planner's talk

    @property
    def video_keys(self) -> list[str]:
        """The cameras' names in the dataset."""
        return [v3.VIDEO_KEYS[camera] for camera in self.cameras]

    @property
    def columns(self) -> dict[str, dict[str, Any]]:
        """Features that are columns of the data files."""
        return v3.COLUMNS | (v3.LANGUAGE if self.language else {})

    def features(self, episode: Episode) -> dict[str, dict[str, Any]]:
        """All features, the videos with the size that an episode's pictures have."""
        features = dict(self.columns)
        for key, video in episode.videos.items():
            size = video.encoded
            features[key] = v3.video_feature(
                height=size.height, width=size.width, fps=self.fps, codec=self.codec
            )
        return features


class DatasetWriter:
    """Adds episodes to the dataset in `root`, which may not exist yet. A context manager only.

    Leaving the `with` block publishes all that was added; leaving it by an exception, or being killed
    in it, publishes nothing and leaves the dataset as it was. Raises DayshiftError when the dataset
    there does not go with `spec`, RecordingError for a full disk or when another process writes there.
    """

    def __init__(
        self, root: Path, spec: DatasetSpec, sizes: FileSizes, *, make_card: Callable[[DatasetMeta], str]
    ) -> None:
        self.root = root
        self._spec = spec
        self._sizes = sizes
        self._make_card = make_card
        self._schema = v3.data_schema(spec.columns)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        meta = _read_to_append(self.root, self._spec) if self.root.exists() else _empty_meta(self._spec)
        draft = DatasetDraft(self.root, meta, self._spec.video_keys, self._sizes)
        self._draft = self._stack.enter_context(draft)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None and self._draft.num_added:
                self._draft.publish(self._make_card(self._draft.meta))

    @property
    def known_attempts(self) -> set[tuple[str, str]]:
        """(run, attempt) of every episode in the dataset."""
        return attempt_keys(self._draft.meta.attempts)

    def add_episode(self, episode: Episode) -> None:
        """Write one episode."""
        self._check_features(episode)
        columns = numeric_columns(episode, self._next_place(episode))
        facts = asdict(episode.facts)
        digests: dict[str, str] = {}
        for key, video in episode.videos.items():
            digests |= {f"first/{key}": video.first_digest, f"last/{key}": video.last_digest}
        self._draft.add(
            data_table(episode, columns, self._schema),
            {key: video.encoded for key, video in episode.videos.items()},
            {"tasks": [episode.facts.instruction], **facts, **flatten_stats(episode_stats(episode, columns))},
            {**facts, **digests},
        )

    def _check_features(self, episode: Episode) -> None:
        """The first episode says how large the pictures are; all others have to agree."""
        info, features = self._draft.meta.info, self._spec.features(episode)
        known = info.features = info.features or features
        if known != features:
            name = next(name for name in known | features if known.get(name) != features.get(name))
            raise DayshiftError(
                f"{self.root}: {name} of attempt {episode.facts.attempt_id} does not go with the dataset's: "
                f"{features.get(name)}, expected {known.get(name)}"
            )

    def _next_place(self, episode: Episode) -> EpisodePlace:
        meta, task = self._draft.meta, episode.facts.instruction
        if task not in meta.tasks:
            meta.tasks.append(task)
        return EpisodePlace(
            episode_index=len(meta.episodes),
            first_index=self._draft.num_frames,
            task_index=meta.tasks.index(task),
            fps=self._spec.fps,
        )


def _empty_meta(spec: DatasetSpec) -> DatasetMeta:
    info = v3.DatasetInfo(
        codebase_version=v3.VERSION,
        fps=spec.fps,
        features={},
        robot_type=v3.ROBOT_TYPE,
        video_path=v3.VIDEO_PATH if spec.cameras else None,
        tools=TOOLS if spec.language else None,
    )
    return DatasetMeta(info=info, tasks=[], episodes=[], attempts=[])


def _read_to_append(root: Path, spec: DatasetSpec) -> DatasetMeta:
    meta = read_meta(root)
    if len(meta.attempts) != len(meta.episodes):
        raise DayshiftError(f"{root}: another tool has edited this dataset; export to a new folder")
    if meta.info.fps != spec.fps:
        raise DayshiftError(f"{root}: has {meta.info.fps} fps, the attempts {spec.fps}")
    return meta
