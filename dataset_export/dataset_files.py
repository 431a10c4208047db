"""The meta files of a dataset as a whole: read for appending and verifying, written when it is published."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.errors import first_line
from dayshift.dataset_export.shards import ShardId
from dayshift.dataset_export.stats import STAT_NAMES, Stats, aggregate
from dayshift.types import DayshiftError

STATS_PREFIX = "stats/"
REWRITTEN = (v3.INFO, v3.STATS, v3.TASKS, v3.ATTEMPTS, v3.CARD)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetMeta:
    """Everything in meta/: rows of episodes and attempts in order, tasks by index."""

    info: v3.DatasetInfo
    tasks: list[str]
    episodes: list[dict[str, Any]]
    attempts: list[dict[str, Any]]

    @property
    def stats(self) -> list[dict[str, Stats]]:
        """Each episode's statistics."""
        return [unflatten_stats(row) for row in self.episodes]

    def shards(self, prefix: str) -> list[ShardId]:
        """Each episode's shard of a kind: "data", "meta/episodes" or "videos/<feature>"."""
        return [ShardId(row[f"{prefix}/chunk_index"], row[f"{prefix}/file_index"]) for row in self.episodes]

    def next_shard(self, prefix: str) -> ShardId:
        """The first free shard of a kind."""
        taken = self.shards(prefix)
        return max(taken).next() if taken else ShardId()


class BrokenMetaError(DayshiftError):
    """A file of meta/ cannot be read; the message names it and says why."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


def read_meta(root: Path) -> DatasetMeta:
    """Read all of meta/. Raises BrokenMetaError, and DayshiftError when there is no v3.0 dataset."""
    info = v3.read_info(root)
    tasks = _read_rows(root / v3.TASKS, ["task_index", "task"])
    episodes: list[dict[str, Any]] = []
    for path in sorted((root / "meta/episodes").glob("*/*.parquet")):
        episodes += _read_rows(path)
    attempts = _read_rows(root / v3.ATTEMPTS) if (root / v3.ATTEMPTS).is_file() else []
    return DatasetMeta(
        info=info,
        tasks=[row["task"] for row in sorted(tasks, key=lambda row: row["task_index"])],
        episodes=episodes,
        attempts=attempts,
    )


def _read_rows(path: Path, columns: list[str] | None = None) -> list[dict[str, Any]]:
    try:
        return pq.read_table(path, columns=columns).to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise BrokenMetaError(path, first_line(error)) from error


def write_meta(root: Path, meta: DatasetMeta, num_old_episodes: int, card: str) -> None:
    """Write the files of `meta`; of the episodes those that are not in a shard yet."""
    new = meta.episodes[num_old_episodes:]
    shard = ShardId(new[0]["meta/episodes/chunk_index"], new[0]["meta/episodes/file_index"])
    path = shard.path(root, v3.EPISODES_PATH)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(new), path)
    pq.write_table(pa.Table.from_pylist(meta.attempts), root / v3.ATTEMPTS)
    pq.write_table(v3.tasks_table(meta.tasks), root / v3.TASKS)
    stats = {
        feature: {name: value.tolist() for name, value in of_feature.items()}
        for feature, of_feature in aggregate(meta.stats).items()
    }
    (root / v3.STATS).write_bytes(msgspec.json.format(msgspec.json.encode(stats), indent=4))
    (root / v3.CARD).write_text(card, encoding="utf-8")
    (root / v3.INFO).write_bytes(meta.info.to_json())


def link_shards(old: Path, new: Path) -> None:
    """Give `new` every file of `old` that is never written again, without copying its bytes."""
    for path in old.rglob("*"):
        relative = path.relative_to(old)
        if path.is_file() and relative.as_posix() not in REWRITTEN:
            target = new / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, target)


def staging_folder(root: Path) -> Path:
    """Where the next version of a dataset is put together; on the same file system, so beside it."""
    return root.parent / f".{root.name}.part"


def empty_folder(folder: Path) -> None:
    """Remove what is in a folder, but not the folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def flatten_stats(stats: dict[str, Stats]) -> dict[str, Any]:
    """Statistics as columns of meta/episodes."""
    return {
        f"{STATS_PREFIX}{feature}/{name}": value.tolist()
        for feature, of_feature in stats.items()
        for name, value in of_feature.items()
    }


def unflatten_stats(row: dict[str, Any]) -> dict[str, Stats]:
    """The statistics in a row of meta/episodes."""
    features = dict.fromkeys(
        name.removeprefix(STATS_PREFIX).rpartition("/")[0] for name in row if name.startswith(STATS_PREFIX)
    )
    return {
        feature: {name: np.array(row[f"{STATS_PREFIX}{feature}/{name}"]) for name in STAT_NAMES}
        for feature in features
    }


def attempt_keys(rows: Sequence[dict[str, Any]]) -> set[tuple[str, str]]:
    """(run, attempt) of each row."""
    return {(row["run_id"], row["attempt_id"]) for row in rows}
