"""Reads datasets with the real lerobot: python -m dayshift.dataset_export.verify_lerobot DIR...

Run by `fresh_process.verify_with_lerobot` in a fresh process, as a user's training would be. Prints
a JSON list with one object per dataset, a `fresh_process.LeRobotReport`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_files import DatasetMeta, read_meta
from dayshift.dataset_export.video import Image, VideoReader

# torchcodec and PyAV turn YUV into RGB with different rounding.
STREAMING_TOLERANCE = 2.0  # mean absolute difference, of 255
NAME = "local/dataset"


def main() -> None:
    """Check the datasets that the command line names."""
    print(json.dumps([check(Path(argument)) for argument in sys.argv[1:]]))


def check(root: Path) -> dict[str, Any]:
    """What lerobot gives from one dataset, compared with what our own reader finds."""
    meta = read_meta(root)
    compared = list(check_random_access(root, meta))
    notes = []
    if has_one_video_file_per_camera(meta):
        compared += check_streaming(root, meta)
    else:
        notes.append(
            f"not streamed: StreamingLeRobotDataset of lerobot {version('lerobot')} looks for a frame at its "
            "time in the whole dataset, so it finds the wrong ones where a camera has several files"
        )
    problems = [{"where": where, "what": what} for where, what in compared if what]
    return {"num_items": len(compared), "problems": problems, "notes": notes}


def has_one_video_file_per_camera(meta: DatasetMeta) -> bool:
    """True when a frame's place in its video is its place in the dataset."""
    return all(
        (row[f"videos/{key}/chunk_index"], row[f"videos/{key}/file_index"]) == (0, 0)
        for key in meta.info.video_keys
        for row in meta.episodes
    )


def check_random_access(root: Path, meta: DatasetMeta) -> Iterator[tuple[str, str]]:
    """(where, what is wrong or "") for the first and last frame of every episode."""
    dataset = LeRobotDataset(NAME, root=root, video_backend="pyav", return_uint8=True)
    if len(dataset) != meta.info.total_frames:
        yield v3.INFO, f"LeRobotDataset has {len(dataset)} frames, expected {meta.info.total_frames}"
        return
    for row in meta.episodes:
        for frame_index in boundary(row):
            item = cast(dict[str, Any], dataset[row["dataset_from_index"] + frame_index])
            yield (
                f"episode {row['episode_index']}",
                compare(item, row, frame_index, root, meta, tolerance=0.0),
            )


def check_streaming(root: Path, meta: DatasetMeta) -> Iterator[tuple[str, str]]:
    """(where, what is wrong or "") for the boundary frames, and the number of frames at last."""
    dataset = StreamingLeRobotDataset(NAME, root=root, shuffle=False, return_uint8=True)
    num_items = 0
    for item in dataset:
        num_items += 1
        row = meta.episodes[int(item["episode_index"])]
        frame_index = int(item["frame_index"])
        if frame_index in boundary(row):
            what = compare(item, row, frame_index, root, meta, tolerance=STREAMING_TOLERANCE)
            yield f"episode {row['episode_index']}, streamed", what
    if num_items != meta.info.total_frames:
        yield v3.INFO, f"StreamingLeRobotDataset gave {num_items} frames, expected {meta.info.total_frames}"


def boundary(row: dict[str, Any]) -> set[int]:
    """First and last frame of an episode."""
    return {0, row["length"] - 1}


def compare(
    item: dict[str, Any],
    row: dict[str, Any],
    frame_index: int,
    root: Path,
    meta: DatasetMeta,
    *,
    tolerance: float,
) -> str:
    """What is wrong with an item of lerobot's, or ""."""
    if int(item["episode_index"]) != row["episode_index"] or int(item["frame_index"]) != frame_index:
        return f"asked for frame {frame_index}, got {int(item['episode_index'])}:{int(item['frame_index'])}"
    if item["task"] not in row["tasks"]:
        return f"frame {frame_index} has the task {item['task']!r}"
    for key in meta.info.video_keys:
        expected = own_picture(row, key, frame_index, root, meta)
        found = item[key].permute(1, 2, 0).numpy().astype(np.float64)
        difference = np.abs(found - expected).mean()
        if difference > tolerance:
            return f"{key} of frame {frame_index} is another picture (mean difference {difference:.1f})"
    return ""


def own_picture(row: dict[str, Any], key: str, frame_index: int, root: Path, meta: DatasetMeta) -> Image:
    """The picture as our own reader finds it, by counting."""
    shard = {name: row[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
    first = round(row[f"videos/{key}/from_timestamp"] * meta.info.fps)
    with VideoReader(root / v3.VIDEO_PATH.format(video_key=key, **shard), fps=meta.info.fps) as video:
        return video.frame(first + frame_index)


if __name__ == "__main__":
    main()
