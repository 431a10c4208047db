"""Is a LeRobot v3.0 dataset whole? Every rule that readers rely on, checked against the files.

`check_dataset` reads every file; `fresh_process.verify_with_lerobot` then loads the dataset with the
real lerobot. A broken file is named and the rest is still checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_files import BrokenMetaError, DatasetMeta, read_meta
from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, first_line
from dayshift.dataset_export.stats import STAT_NAMES, aggregate
from dayshift.dataset_export.video import VideoReader
from dayshift.sim.types import CONTROL_HZ

Row = dict[str, Any]

# Editing tools renumber these columns and leave the episodes' statistics of them as they were.
BOOKKEEPING = {"episode_index", "index", "task_index", "timestamp", "frame_index"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something wrong, in one line, and the file or episode that it is about."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What was checked, and what is wrong."""

    num_episodes: int
    num_frames: int
    num_pictures: int  # in all videos
    num_digests: int  # pictures compared with the hash that was kept of them
    problems: tuple[Problem, ...]

    @property
    def is_whole(self) -> bool:
        return not self.problems


class _Counts:
    num_pictures = 0
    num_digests = 0


def check_dataset(root: Path) -> VerifyReport:
    """Run all own checks; without meta/, whether the other files can be read.

    Raises DayshiftError when there is no dataset.
    """
    try:
        meta = read_meta(root)
    except BrokenMetaError as error:
        return _check_without_meta(root, error)
    counts = _Counts()
    problems = [
        *_check_info(meta),
        *_check_tasks(root, meta),
        *_check_episodes(meta),
        *_check_files(root, meta),
        *_check_data(root, meta),
        *_check_videos(root, meta, counts),
        *_check_digests(root, meta, counts),
        *_check_stats(root, meta),
    ]
    return VerifyReport(
        num_episodes=len(meta.episodes),
        num_frames=sum(row["length"] for row in meta.episodes),
        num_pictures=counts.num_pictures,
        num_digests=counts.num_digests,
        problems=tuple(problems),
    )


def _check_without_meta(root: Path, error: BrokenMetaError) -> VerifyReport:
    """Count what is there beside a broken file of meta/."""
    problems = [Problem(where=error.path.relative_to(root).as_posix(), what=error.reason)]

    def count(pattern: str, count_in: Callable[[Path], int]) -> int:
        total = 0
        for path in sorted(set(root.glob(pattern)) - {error.path}):
            try:
                total += count_in(path)
            except (*BROKEN_FILE_ERRORS, pa.ArrowException) as broken:
                problems.append(Problem(where=path.relative_to(root).as_posix(), what=first_line(broken)))
        return total

    def num_rows(path: Path) -> int:
        return pq.read_metadata(path).num_rows

    def num_pictures(path: Path) -> int:
        with VideoReader(path, fps=CONTROL_HZ) as video:
            return len(video.frame_indices)

    return VerifyReport(
        num_episodes=count("meta/episodes/*/*.parquet", num_rows),
        num_frames=count("data/*/*.parquet", num_rows),
        num_pictures=count("videos/*/*/*.mp4", num_pictures),
        num_digests=0,
        problems=tuple(problems),
    )


def _check_info(meta: DatasetMeta) -> Iterator[Problem]:
    info = meta.info
    expected = {
        "total_episodes": len(meta.episodes),
        "total_frames": sum(row["length"] for row in meta.episodes),
        "total_tasks": len(meta.tasks),
        "splits": {"train": f"0:{len(meta.episodes)}"},
    }
    for name, value in expected.items():
        if getattr(info, name) != value:
            yield Problem(where=v3.INFO, what=f"{name} is {getattr(info, name)}, the files have {value}")
    for key in info.video_keys:
        if not info.features[key]["names"]:
            yield Problem(where=v3.INFO, what=f"{key} has no names for its dimensions")


def _check_tasks(root: Path, meta: DatasetMeta) -> Iterator[Problem]:
    """Readers take the task of a frame by row number, so the order must be the index."""
    indices = pq.read_table(root / v3.TASKS, columns=["task_index"]).column("task_index").to_pylist()
    if indices != list(range(len(indices))):
        yield Problem(
            where=v3.TASKS, what=f"task_index is {indices}, expected 0 to {len(indices) - 1} in order"
        )
    if len(set(meta.tasks)) != len(meta.tasks):
        yield Problem(where=v3.TASKS, what="a task is there twice")


def _check_episodes(meta: DatasetMeta) -> Iterator[Problem]:
    """Readers take an episode by position, so rows must be 0 to N-1 in order, without gaps."""
    next_index = 0
    for position, row in enumerate(meta.episodes):
        where = f"episode {position}"
        if row["episode_index"] != position:
            yield Problem(where=where, what=f"its row says episode_index {row['episode_index']}")
        if row["length"] <= 0:
            yield Problem(where=where, what=f"length {row['length']}")
        span = (row["dataset_from_index"], row["dataset_to_index"])
        if span != (next_index, next_index + row["length"]):
            yield Problem(
                where=where, what=f"frames {span}, expected {(next_index, next_index + row['length'])}"
            )
        next_index = span[1]
        unknown = set(row["tasks"]) - set(meta.tasks)
        if unknown:
            yield Problem(where=where, what=f"unknown tasks {sorted(unknown)}")


def _check_files(root: Path, meta: DatasetMeta) -> Iterator[Problem]:
    """No file that episodes point to is missing, and none lies about that readers would pick up."""
    expected = {_data_path(row) for row in meta.episodes}
    for key in meta.info.video_keys:
        expected |= {_video_path(row, key) for row in meta.episodes}
    found = {
        path.relative_to(root).as_posix()
        for pattern in ("data/*/*.parquet", "videos/*/*/*.mp4")
        for path in root.glob(pattern)
    }
    for path in sorted(expected - found):
        yield Problem(where=path, what="the file is missing")
    for path in sorted(found - expected):
        yield Problem(where=path, what="no episode is in this file")


def _check_data(root: Path, meta: DatasetMeta) -> Iterator[Problem]:
    for path, rows in _by_file(meta.episodes, _data_path).items():
        if not (root / path).is_file():
            continue
        try:
            table = pq.read_table(root / path)
        except (OSError, pa.ArrowException) as error:
            yield Problem(where=path, what=first_line(error))
            continue
        if missing := sorted(set(meta.info.features) - set(meta.info.video_keys) - set(table.column_names)):
            yield Problem(where=path, what=f"columns {missing} are missing")
            continue
        if undeclared := sorted(set(table.column_names) - set(meta.info.features)):
            yield Problem(where=path, what=f"columns {undeclared} are not in {v3.INFO}")
        if table.num_rows != sum(row["length"] for row in rows):
            expected = sum(row["length"] for row in rows)
            yield Problem(where=path, what=f"{table.num_rows} rows, its episodes have {expected} frames")
            continue
        first = 0
        for row in rows:
            yield from _check_rows(table.slice(first, row["length"]), row, meta)
            first += row["length"]


def _check_rows(table: pa.Table, row: Row, meta: DatasetMeta) -> Iterator[Problem]:
    where = f"episode {row['episode_index']}"
    frame_index = np.arange(row["length"])
    expected: dict[str, NDArray[Any]] = {
        "episode_index": np.full(row["length"], row["episode_index"]),
        "frame_index": frame_index,
        "index": row["dataset_from_index"] + frame_index,
        "timestamp": (frame_index / meta.info.fps).astype(np.float32),
    }
    if "next.done" in table.column_names:
        expected["next.done"] = frame_index == row["length"] - 1
    for name, values in expected.items():
        if not np.array_equal(table.column(name).to_numpy(), values):
            yield Problem(where=where, what=f"{name} is not {_describe(values)}")
    tasks = {meta.tasks[i] for i in set(table.column("task_index").to_pylist()) if 0 <= i < len(meta.tasks)}
    if tasks != set(row["tasks"]):
        yield Problem(where=where, what=f"its frames have the tasks {sorted(tasks)}, its row {row['tasks']}")
    for name in ("observation.state", "action"):
        values = table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if not np.isfinite(values).all():
            yield Problem(where=where, what=f"{name} has values that are no finite numbers")
        stats = row.get(f"stats/{name}/max")
        if stats is not None and not np.allclose(values.reshape(row["length"], -1).max(axis=0), stats):
            yield Problem(where=where, what=f"the statistics of {name} are not those of its frames")


def _check_videos(root: Path, meta: DatasetMeta, counts: _Counts) -> Iterator[Problem]:
    for key in meta.info.video_keys:
        for path, rows in _by_file(meta.episodes, lambda row, key=key: _video_path(row, key)).items():
            if (root / path).is_file():
                yield from _check_video(root, path, rows, key, meta.info.fps, counts)


def _check_video(
    root: Path, path: str, rows: list[Row], key: str, fps: int, counts: _Counts
) -> Iterator[Problem]:
    """As many pictures as rows, picture n at n / fps, each episode where its row says."""
    try:
        with VideoReader(root / path, fps=fps) as video:
            indices = video.frame_indices
    except BROKEN_FILE_ERRORS as error:
        yield Problem(where=path, what=first_line(error))
        return
    counts.num_pictures += len(indices)
    expected = sum(row["length"] for row in rows)
    if indices != list(range(expected)):
        yield Problem(
            where=path, what=f"{len(indices)} pictures or wrong times, its episodes have {expected} frames"
        )
    first = 0
    for row in rows:
        span = (row[f"videos/{key}/from_timestamp"] * fps, row[f"videos/{key}/to_timestamp"] * fps)
        if not np.allclose(span, (first, first + row["length"]), rtol=0, atol=1e-6):
            where = f"episode {row['episode_index']}"
            yield Problem(
                where=where, what=f"{key} is at pictures {span}, expected {(first, first + row['length'])}"
            )
        first += row["length"]


def _check_digests(root: Path, meta: DatasetMeta, counts: _Counts) -> Iterator[Problem]:
    """The first and last picture of each episode are those that were recorded, by hash."""
    if len(meta.attempts) != len(meta.episodes):
        return  # edited by a tool that does not know meta/attempts
    for key in meta.info.video_keys:
        for path, rows in _by_file(meta.episodes, lambda row, key=key: _video_path(row, key)).items():
            try:
                with VideoReader(root / path, fps=meta.info.fps) as video:
                    for row in rows:
                        yield from _check_boundary(video, row, key, meta, counts)
            except BROKEN_FILE_ERRORS as error:
                yield Problem(where=path, what=first_line(error))


def _check_boundary(
    video: VideoReader, row: Row, key: str, meta: DatasetMeta, counts: _Counts
) -> Iterator[Problem]:
    attempt = meta.attempts[row["episode_index"]]
    first = round(row[f"videos/{key}/from_timestamp"] * meta.info.fps)
    for name, picture in (("first", first), ("last", first + row["length"] - 1)):
        counts.num_digests += 1
        if video.digest(picture) != attempt[f"{name}/{key}"]:
            where = f"episode {row['episode_index']}"
            yield Problem(where=where, what=f"the {name} picture of {key} is not the one recorded")


def _check_stats(root: Path, meta: DatasetMeta) -> Iterator[Problem]:
    try:
        stats = msgspec.json.decode((root / v3.STATS).read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        yield Problem(where=v3.STATS, what=first_line(error))
        return
    expected = aggregate(meta.stats)
    for feature, values in expected.items():
        if feature in BOOKKEEPING:
            continue
        for name in STAT_NAMES:
            if not np.allclose(stats.get(feature, {}).get(name, np.nan), values[name], rtol=1e-5, atol=1e-7):
                yield Problem(where=v3.STATS, what=f"{feature}/{name} is not the aggregate of the episodes'")
    for key in meta.info.video_keys:
        if np.shape(stats.get(key, {}).get("mean")) != (3, 1, 1):
            yield Problem(where=v3.STATS, what=f"{key} has no statistics per channel")


def _by_file(episodes: list[Row], path_of: Callable[[Row], str]) -> dict[str, list[Row]]:
    files: dict[str, list[Row]] = {}
    for row in episodes:
        files.setdefault(path_of(row), []).append(row)
    return files


def _data_path(row: Row) -> str:
    return v3.DATA_PATH.format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])


def _video_path(row: Row, key: str) -> str:
    shard = {name: row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
    return v3.VIDEO_PATH.format(video_key=key, **shard)


def _describe(values: NDArray[Any]) -> str:
    return f"{values[0]} to {values[-1]}, frame by frame"
