"""How fast attempts become a dataset, beside lerobot's own writer on the same attempts.

    python -m dayshift.dataset_export.writer_speed DATASET RUN_DIR...

DATASET is an export of these runs. Ours is the export as a user calls it, once every picture is
there. lerobot's writer gets the same frames, decoded beforehand (that time is not counted), and encodes
them in its default mode and in its streaming modes.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.configs import RGBEncoderConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_files import DatasetMeta, read_meta
from dayshift.dataset_export.dense_video import dense_path
from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.run_folder import RecordedAttempt, open_run
from dayshift.dataset_export.video import VideoReader
from dayshift.sim.types import CAMERAS

NUM_EXPORTS = 3
LEROBOT_MODES: dict[str, dict[str, Any]] = {
    "lerobot, default (PNG, then AV1)": {},
    "lerobot, streaming AV1": {"streaming_encoding": True},
    "lerobot, streaming H.264": {
        "streaming_encoding": True,
        "rgb_encoder": RGBEncoderConfig(vcodec="h264", preset="veryfast", crf=23),
    },
}


def main() -> None:
    """Measure and print one JSON object: frame pairs per second by writer."""
    dataset, runs = Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]]
    meta = read_meta(dataset)
    episodes = [episode_frames(attempt, meta) for attempt in exported_attempts(runs, meta)]
    num_frames = sum(len(frames) for frames in episodes)
    rates = {"ours": num_frames / float(np.median([time_export(runs) for _ in range(NUM_EXPORTS)]))}
    for name, options in LEROBOT_MODES.items():
        rates[name] = num_frames / time_lerobot(episodes, meta, options)
    print(json.dumps({"num_episodes": len(episodes), "num_frames": num_frames, "frame_pairs_per_s": rates}))


def exported_attempts(runs: list[Path], meta: DatasetMeta) -> Iterator[RecordedAttempt]:
    """The recorded attempts that are in the dataset."""
    exported = {(row["run_id"], row["attempt_id"]) for row in meta.attempts}
    for path in runs:
        with open_run(path) as run:
            for recorded in run.recorded_attempts():
                if (run.run.run_id, recorded.attempt.attempt_id) in exported:
                    yield recorded


def episode_frames(recorded: RecordedAttempt, meta: DatasetMeta) -> list[dict[str, Any]]:
    """An attempt's frames as lerobot's `add_frame` takes them."""
    table = recorded.frames()
    images: dict[str, list[Any]] = {}
    for camera in CAMERAS:
        with VideoReader(dense_path(recorded, camera), fps=recorded.fps) as video:
            images[v3.VIDEO_KEYS[camera]] = [image for _, image in video.frames()]
    return [
        {
            "observation.state": table.robot_state[i],
            "action": table.action[i],
            "task": recorded.attempt.instruction,
            **{key: pictures[i] for key, pictures in images.items()},
        }
        for i in range(len(table))
    ]


def time_export(runs: list[Path]) -> float:
    """Seconds for our export."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        export_dataset(runs, Path(folder) / "dataset", ExportOptions())
        return time.perf_counter() - started


def time_lerobot(episodes: list[list[dict[str, Any]]], meta: DatasetMeta, options: dict[str, Any]) -> float:
    """Seconds for lerobot's writer."""
    keys = ["observation.state", "action", *v3.VIDEO_KEYS.values()]
    features = {}
    for key in keys:
        known = meta.info.features[key]
        features[key] = {"dtype": known["dtype"], "shape": tuple(known["shape"]), "names": known["names"]}
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        dataset = LeRobotDataset.create(
            "local/speed", meta.info.fps, features, root=Path(folder) / "dataset", use_videos=True, **options
        )
        for frames in episodes:
            for frame in frames:
                dataset.add_frame(dict(frame))
            dataset.save_episode()
        dataset.finalize()
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
