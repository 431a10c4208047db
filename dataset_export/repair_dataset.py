"""Making a damaged dataset whole again, without the episodes that cannot be saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_draft import DatasetDraft, FileSizes
from dayshift.dataset_export.dataset_files import DatasetMeta, read_meta
from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, first_line
from dayshift.dataset_export.shards import EncodedVideo, ShardId, read_encoded_part
from dayshift.dataset_export.verify import Problem, check_dataset
from dayshift.dataset_export.video import VideoReader
from dayshift.types import DayshiftError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRepair:
    """What `repair_dataset` found and did."""

    problems: tuple[Problem, ...]  # of before
    num_kept: int
    dropped: tuple[Problem, ...]  # episodes that could not be saved, and why

    def __str__(self) -> str:
        if not self.problems:
            return "nothing to repair"
        lines = [f"kept {self.num_kept} episodes, dropped {len(self.dropped)}", *map(str, self.dropped)]
        return "; ".join(lines)


def repair_dataset(root: Path) -> DatasetRepair:
    """Write a new version of a dataset from the episodes whose rows and pictures are all there.

    Numbers, times and statistics of the dataset are made anew; a whole dataset is left alone. Raises
    DayshiftError when meta/ cannot be read or no episode can be saved: then export the runs again.
    """
    problems = check_dataset(root).problems
    if not problems:
        return DatasetRepair(problems=(), num_kept=len(read_meta(root).episodes), dropped=())
    old = read_meta(root)
    card = (root / v3.CARD).read_text(encoding="utf-8") if (root / v3.CARD).is_file() else ""
    dropped: list[Problem] = []
    attempts = {attempt["episode_index"]: attempt for attempt in old.attempts}
    if len(attempts) != len(old.episodes):
        attempts = {}  # edited by a tool that does not know them
    empty = DatasetMeta(info=old.info, tasks=list(old.tasks), episodes=[], attempts=[])
    with DatasetDraft(root, empty, old.info.video_keys, FileSizes()) as draft:
        for row in old.episodes:
            attempt = attempts.get(row["episode_index"], {})
            try:
                videos = {
                    key: _read_pictures(root, row, key, attempt, old.info.fps) for key in old.info.video_keys
                }
                table = _read_rows(root, row, draft)
            except BROKEN_FILE_ERRORS as error:
                where = f"episode {row['episode_index']}"
                dropped.append(Problem(where=where, what=first_line(error)))
                continue
            draft.add(table, videos, row, attempt)
        if not draft.num_added:
            raise DayshiftError(f"{root}: no episode can be saved; export the runs again")
        draft.publish(card)
    return DatasetRepair(problems=problems, num_kept=draft.num_added, dropped=tuple(dropped))


def _read_rows(root: Path, row: Row, draft: DatasetDraft) -> pa.Table:
    """An episode's frames, with the numbers that they will have."""
    path = ShardId(row["data/chunk_index"], row["data/file_index"]).path(root, v3.DATA_PATH)
    table = pq.read_table(path, filters=[("episode_index", "=", row["episode_index"])])
    if table.num_rows != row["length"] or not row["length"]:
        raise ValueError(f"{path}: {table.num_rows} frames, expected {row['length']}")
    schema = v3.data_schema(draft.meta.info.features)
    frame_index = np.arange(table.num_rows)
    numbers = {
        "frame_index": frame_index,
        "timestamp": (frame_index / draft.meta.info.fps).astype(np.float32),
        "index": draft.num_frames + frame_index,
        "episode_index": np.full(table.num_rows, len(draft.meta.episodes)),
        "task_index": np.full(table.num_rows, draft.meta.tasks.index(row["tasks"][0])),
    }
    arrays = [
        pa.array(numbers[name]) if name in numbers else table.column(name).combine_chunks()
        for name in schema.names
    ]
    typed = [array.cast(schema.field(name).type) for array, name in zip(arrays, schema.names, strict=True)]
    return pa.Table.from_arrays(typed, schema=schema)


def _read_pictures(root: Path, row: Row, key: str, attempt: Row, fps: int) -> EncodedVideo:
    """An episode's pictures, found to be the recorded ones where their hashes were kept."""
    shard = ShardId(row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"])
    path = shard.path(root, v3.VIDEO_PATH, video_key=key)
    first = round(row[f"videos/{key}/from_timestamp"] * fps)
    encoded = read_encoded_part(path, first=first, num_frames=row["length"], fps=fps)
    with VideoReader(path, fps=fps) as video:
        for name, number in (("first", first), ("last", first + row["length"] - 1)):
            if video.digest(number) != attempt.get(f"{name}/{key}", video.digest(number)):
                raise ValueError(f"{path}: the {name} picture is not the one recorded")
    return encoded
