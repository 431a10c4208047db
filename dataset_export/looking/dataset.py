"""A dataset read episode by episode: curves, words and facts, and where the pictures are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_files import read_meta
from dayshift.dataset_export.errors import first_line
from dayshift.dataset_export.shards import ShardId
from dayshift.types import DayshiftError

# Where a frame is, not what happened in it.
_BOOKKEEPING = {"timestamp", "frame_index", "episode_index", "index", "task_index", "recorded_at"}
_NUMBERS = re.compile(r"float\d+|u?int\d+|bool")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEntry:
    """An episode as a list shows it.

    `facts` is its row in meta/attempts; empty for a dataset that has none, or that was edited by a tool
    that does not know them.
    """

    episode_index: int
    num_frames: int
    task: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A numeric feature over an episode's frames, a label for each dimension."""

    feature: str
    labels: tuple[str, ...]
    values: NDArray[np.float64]  # (num_frames, num_dimensions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Something that was said on a frame, or that is in force from it on.

    `style` is "plan", "subtask", "memory" and the like for what is in force, "" for a message.
    """

    frame_index: int
    role: str
    style: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode without its pictures. Frame n is at n / `fps` seconds.

    `identity` is (run, attempt) of what was recorded, and `recorded_at` the run clock's time of each
    frame in seconds; None where the dataset does not say.
    """

    entry: EpisodeEntry
    fps: int
    curves: tuple[Curve, ...]
    words: tuple[Words, ...]
    identity: tuple[str, str] | None
    recorded_at: NDArray[np.float64] | None  # (num_frames,)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoPart:
    """An episode's pictures of one camera: those from `first` on in the video `path`."""

    path: Path
    first: int
    num_frames: int
    fps: int


class Dataset:
    """A LeRobot v3.0 dataset, as it was when it was opened. Raises DayshiftError when there is none."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._meta = read_meta(root)

    @property
    def fps(self) -> int:
        return self._meta.info.fps

    @property
    def cameras(self) -> list[str]:
        """Features that are videos."""
        return self._meta.info.video_keys

    @cached_property
    def entries(self) -> list[EpisodeEntry]:
        """All episodes, in order."""
        meta = self._meta
        known = len(meta.attempts) == len(meta.episodes)
        return [
            EpisodeEntry(
                episode_index=row["episode_index"],
                num_frames=row["length"],
                task="; ".join(row["tasks"]),
                facts=_facts(meta.attempts[position]) if known else {},
            )
            for position, row in enumerate(meta.episodes)
        ]

    def entry(self, episode_index: int) -> EpisodeEntry:
        """Raises DayshiftError when there is no such episode."""
        if not 0 <= episode_index < len(self.entries):
            raise DayshiftError(
                f"{self.root}: no episode {episode_index}, allowed: 0 to {len(self.entries) - 1}"
            )
        return self.entries[episode_index]

    def episode(self, episode_index: int) -> Episode:
        """Read an episode's rows. Raises DayshiftError when it is not there or its file is broken."""
        entry = self.entry(episode_index)
        row = self._meta.episodes[episode_index]
        shard = ShardId(row["data/chunk_index"], row["data/file_index"])
        table = _read_episode_rows(shard.path(self.root, v3.DATA_PATH), episode_index)
        if table.num_rows != entry.num_frames:
            raise DayshiftError(
                f"{self.root}: episode {episode_index} has {table.num_rows} rows, expected {entry.num_frames}"
            )
        return Episode(
            entry=entry,
            fps=self.fps,
            curves=tuple(_curves(table, self._meta.info.features)),
            words=tuple(sorted(_words(table, self.fps), key=lambda words: words.frame_index)),
            identity=_identity(table),
            recorded_at=_column(table, "recorded_at"),
        )

    def video(self, camera: str, episode_index: int) -> VideoPart:
        """Where an episode's pictures are. Raises DayshiftError for an unknown camera or episode."""
        entry = self.entry(episode_index)
        if camera not in self.cameras:
            raise DayshiftError(f"{self.root}: no camera {camera}, allowed: {', '.join(self.cameras)}")
        row = self._meta.episodes[episode_index]
        shard = ShardId(row[f"videos/{camera}/chunk_index"], row[f"videos/{camera}/file_index"])
        return VideoPart(
            path=shard.path(self.root, v3.VIDEO_PATH, video_key=camera),
            first=round(row[f"videos/{camera}/from_timestamp"] * self.fps),
            num_frames=entry.num_frames,
            fps=self.fps,
        )

    def digests(self, camera: str, episode_index: int) -> tuple[str, str] | None:
        """Hashes of an episode's first and last picture as recorded; None where none were kept."""
        if not self.entry(episode_index).facts:
            return None
        attempt = self._meta.attempts[episode_index]
        return attempt[f"first/{camera}"], attempt[f"last/{camera}"]


def _facts(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Without the pictures' hashes."""
    return {name: value for name, value in attempt.items() if "/" not in name and name != "episode_index"}


def _read_episode_rows(path: Path, episode_index: int) -> pa.Table:
    try:
        return pq.read_table(path, filters=[("episode_index", "==", episode_index)])
    except (OSError, pa.ArrowException) as error:
        raise DayshiftError(f"{path}: {first_line(error)}") from error


def _curves(table: pa.Table, features: Mapping[str, Mapping[str, Any]]) -> Iterator[Curve]:
    for name, feature in features.items():
        if name in _BOOKKEEPING or not _NUMBERS.fullmatch(feature["dtype"]):
            continue
        values = _column(table, name)
        if values is None:
            continue
        values = values.reshape(table.num_rows, -1)
        yield Curve(feature=name, labels=_labels(name, feature, values.shape[1]), values=values)


def _labels(name: str, feature: Mapping[str, Any], size: int) -> tuple[str, ...]:
    """LeRobot's `names` are a list, a mapping with lists in it, or missing; no label is there twice."""
    names = feature.get("names")
    if isinstance(names, Mapping):
        names = [one for part in names.values() if isinstance(part, Sequence) for one in part]
    if names and len(set(map(str, names))) == len(names) == size:
        return tuple(map(str, names))
    last = name.rpartition(".")[2]
    return (last,) if size == 1 else tuple(f"{last}{number}" for number in range(size))


def _column(table: pa.Table, name: str) -> NDArray[np.float64] | None:
    """A numeric column, lists of any depth laid out flat."""
    if name not in table.column_names:
        return None
    column = table.column(name).combine_chunks()
    while pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    return column.to_numpy(zero_copy_only=False).astype(np.float64)


def _words(table: pa.Table, fps: int) -> Iterator[Words]:
    """LeRobot's language columns: the states are on every frame alike, an event on its own frame."""
    if v3.PERSISTENT in table.column_names:
        for state in table.column(v3.PERSISTENT)[0].as_py():
            yield Words(
                frame_index=min(max(round(state["timestamp"] * fps), 0), table.num_rows - 1),
                role=state["role"],
                style=state["style"] or "",
                content=state["content"] or "",
            )
    if v3.EVENTS in table.column_names:
        for frame_index, events in enumerate(table.column(v3.EVENTS).to_pylist()):
            for event in events:
                yield Words(
                    frame_index=frame_index,
                    role=event["role"],
                    style=event["style"] or "",
                    content=event["content"] or "",
                )


def _identity(table: pa.Table) -> tuple[str, str] | None:
    """From the column `attempt_id`, which survives editing tools: "<run>/<attempt>"."""
    if "attempt_id" not in table.column_names:
        return None
    run_id, _, attempt_id = table.column("attempt_id")[0].as_py().rpartition("/")
    return (run_id, attempt_id) if run_id else None
