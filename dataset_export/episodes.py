"""An attempt as an episode: the rows of its frames, its statistics, its row in meta/episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.attempt_files import FrameTable
from dayshift.dataset_export.language import EpisodeLanguage, LanguageEvent, LanguageState
from dayshift.dataset_export.selection import AttemptFacts, Candidate
from dayshift.dataset_export.shards import EncodedVideo, read_encoded
from dayshift.dataset_export.stats import Stats, column_stats, read_picture_stats
from dayshift.dataset_export.video import VideoReader, counts_path


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeVideo:
    """One camera's pictures of every control step, still encoded."""

    encoded: EncodedVideo
    stats: Stats
    first_digest: str  # of the first and last picture (see `VideoReader.digest`)
    last_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One attempt, read and found whole."""

    facts: AttemptFacts
    frames: FrameTable
    language: EpisodeLanguage
    videos: Mapping[str, EpisodeVideo]  # by feature

    @property
    def length(self) -> int:
        return len(self.frames)


def read_episode(candidate: Candidate, videos: Mapping[str, Path]) -> Episode:
    """Read an attempt; `videos` has a picture for every control step. Raises BROKEN_FILE_ERRORS."""
    recorded, facts = candidate.recorded, candidate.facts
    frames = recorded.frames()
    if len(frames) != facts.num_frames:
        raise ValueError(f"{recorded.folder}: {len(frames)} frames, {facts.num_frames} were recorded")
    return Episode(
        facts=facts,
        frames=frames,
        language=candidate.conversation.language(recorded.attempt),
        videos={key: _read_video(path, len(frames), recorded.fps) for key, path in videos.items()},
    )


def _read_video(path: Path, num_frames: int, fps: int) -> EpisodeVideo:
    encoded = read_encoded(path, num_frames=num_frames, fps=fps)
    with VideoReader(path, fps=fps) as reader:
        return EpisodeVideo(
            encoded=encoded,
            stats=read_picture_stats(counts_path(path)),
            first_digest=reader.digest(0),
            last_digest=reader.digest(num_frames - 1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodePlace:
    """Where an episode stands in its dataset."""

    episode_index: int
    first_index: int  # the number of its first frame, counted over the whole dataset
    task_index: int
    fps: int


def numeric_columns(episode: Episode, place: EpisodePlace) -> dict[str, NDArray[Any]]:
    """Every column with statistics: (n,) or (n, size)."""
    frames = episode.frames
    n = episode.length
    frame_index = np.arange(n)
    return {
        "observation.state": frames.robot_state,
        "action": frames.action,
        "next.reward": frames.reward,
        "next.success": frames.success,
        "next.done": frame_index == n - 1,
        "recorded_at": frames.t,
        "timestamp": (frame_index / place.fps).astype(np.float32),
        "frame_index": frame_index,
        "episode_index": np.full(n, place.episode_index),
        "index": place.first_index + frame_index,
        "task_index": np.full(n, place.task_index),
    }


def data_table(episode: Episode, columns: Mapping[str, NDArray[Any]], schema: pa.Schema) -> pa.Table:
    """The rows of an episode's frames."""
    n = episode.length
    arrays = {
        "attempt_id": pa.array([f"{episode.facts.run_id}/{episode.facts.attempt_id}"] * n),
        **{name: _array(values) for name, values in columns.items()},
    }
    if v3.EVENTS in schema.names:
        arrays |= _language_arrays(episode.language, n, schema)
    return pa.Table.from_arrays(
        [arrays[name].cast(schema.field(name).type) for name in schema.names], schema=schema
    )


def _array(values: NDArray[Any]) -> pa.Array:
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])


def _language_arrays(language: EpisodeLanguage, n: int, schema: pa.Schema) -> dict[str, pa.Array]:
    """The states on every frame; the events on the first frame and the last."""
    events: list[list[LanguageEvent]] = [[] for _ in range(n)]
    events[0] += language.first_frame
    events[-1] += language.last_frame
    rows: dict[str, list[list[dict[str, Any]]]] = {
        v3.PERSISTENT: [[_row(state) for state in language.states]] * n,
        v3.EVENTS: [[_row(event) for event in of_frame] for of_frame in events],
    }
    return {name: pa.array(values, _storage(schema.field(name).type)) for name, values in rows.items()}


def _row(row: LanguageState | LanguageEvent) -> dict[str, Any]:
    return asdict(row) | {"tool_calls": list(row.tool_calls) if row.tool_calls else None}


def _storage(kind: pa.DataType) -> pa.DataType:
    """The same type with JSON as plain text: what Arrow can build from Python values."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_list(kind):
        return pa.list_(_storage(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(kind.field(i).name, _storage(kind.field(i).type)) for i in range(kind.num_fields)])
    return kind


def episode_stats(episode: Episode, columns: Mapping[str, NDArray[Any]]) -> dict[str, Stats]:
    """Statistics of all features of an episode."""
    stats = {name: column_stats(values) for name, values in columns.items()}
    return stats | {key: video.stats for key, video in episode.videos.items()}
