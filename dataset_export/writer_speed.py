"""How fast attempts become a dataset, beside lerobot's own writer on the same attempts.

    python -m dayshift.dataset_export.writer_speed MAX_FRAMES SIZES RUN_DIR...

For each picture size the shortest attempts are taken, up to MAX_FRAMES in all; pictures of another size
than the recorded one are rendered from the states first. Ours is the export as a user calls it, once every
picture is there: the median of several. lerobot's writer gets the same frames, decoded beforehand (that
time is not counted), and encodes them in its default mode and in its streaming modes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from lerobot.configs import RGBEncoderConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dense_video import dense_path
from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.fresh_process import WriterSpeed
from dayshift.dataset_export.prerender import prerender
from dayshift.dataset_export.run_folder import RecordedAttempt, open_run
from dayshift.dataset_export.scheduling import scheduling_kept
from dayshift.dataset_export.store import DATABASE, RunStore, database_url
from dayshift.dataset_export.tables import AttemptRow, RecordingRow
from dayshift.dataset_export.video import H264, VideoReader
from dayshift.sim.types import CAMERAS, CONTROL_HZ
from dayshift.types import Outcome

NUM_EXPORTS = 5
LEROBOT_MODES: dict[str, dict[str, Any]] = {
    "lerobot, default (PNG, then AV1)": {},
    "lerobot, streaming AV1": {"streaming_encoding": True},
    "lerobot, streaming H.264": {
        "streaming_encoding": True,
        "rgb_encoder": RGBEncoderConfig(vcodec="h264", preset="veryfast", crf=23),
    },
}

Episode = list[dict[str, Any]]  # frames as lerobot's `add_frame` takes them


def main() -> None:
    """Measure and print a JSON list of `fresh_process.WriterSpeed`."""
    max_frames, sizes = int(sys.argv[1]), [int(size) for size in sys.argv[2].split(",")]
    rows = [row for size in sizes for row in measure(Path(sys.argv[3]), size, max_frames)]
    print(msgspec.json.encode(rows).decode())


def measure(run_dir: Path, image_size: int, max_frames: int) -> Iterator[WriterSpeed]:
    """Our writer and lerobot's on a run's shortest attempts."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = copy_run(run_dir, Path(folder), image_size, max_frames)
        with open_run(run_dir) as run:
            prerender(run)
            episodes = [episode_frames(attempt) for attempt in run.recorded_attempts()]
        num_frames = sum(map(len, episodes))

        def row(writer: str, seconds: float) -> WriterSpeed:
            return WriterSpeed(
                writer=writer,
                image_size=image_size,
                num_episodes=len(episodes),
                num_frames=num_frames,
                frame_pairs_per_s=num_frames / seconds,
            )

        yield row("ours", float(np.median([time_export(run_dir) for _ in range(NUM_EXPORTS)])))
        for name, options in LEROBOT_MODES.items():
            yield row(name, time_lerobot(episodes, image_size, options))


def copy_run(run_dir: Path, folder: Path, image_size: int, max_frames: int) -> Path:
    """A run with the shortest attempts only, their pictures to be rendered anew if they have another size."""
    copy = folder / run_dir.name
    copy.mkdir()
    with (
        contextlib.closing(sqlite3.connect(run_dir / DATABASE)) as source,
        contextlib.closing(sqlite3.connect(copy / DATABASE)) as target,
    ):
        source.backup(target)  # unlike a copy of the file, has what is in SQLite's log, too
    num_frames = 0
    with RunStore(database_url(copy), run_dir.name) as store:
        for recording in sorted(store.rows(RecordingRow), key=lambda row: row.num_frames):
            (attempt,) = store.rows(AttemptRow, attempt_id=recording.attempt_id)
            num_frames += recording.num_frames
            if attempt.outcome == Outcome.INFRA or num_frames > max_frames:
                store.delete(AttemptRow, attempt_id=recording.attempt_id)
                continue
            attempt_dir = files.attempt_folder(copy, recording.attempt_id)
            shutil.copytree(files.attempt_folder(run_dir, recording.attempt_id), attempt_dir)
            if set_image_size(attempt_dir, image_size):
                recording.num_images = {}
                store.save(recording)
    return copy


def set_image_size(attempt_dir: Path, image_size: int) -> bool:
    """Throw away pictures of another size; False when they have this one."""
    start = files.read_start(attempt_dir / files.START)
    if start.spec.image_size == image_size:
        return False
    spec = dataclasses.replace(start.spec, image_size=image_size)
    files.write_start(attempt_dir / files.START, dataclasses.replace(start, spec=spec))
    for video in attempt_dir.glob("*.mp4"):
        video.unlink()
    return True


def episode_frames(recorded: RecordedAttempt) -> Episode:
    """An attempt's frames with decoded pictures."""
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


def time_export(run_dir: Path) -> float:
    """Seconds for our export."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        export_dataset([run_dir], Path(folder) / "dataset", ExportOptions())
        return time.perf_counter() - started


def time_lerobot(episodes: list[Episode], image_size: int, options: dict[str, Any]) -> float:
    """Seconds for lerobot's writer."""
    picture = v3.video_feature(height=image_size, width=image_size, fps=CONTROL_HZ, codec=H264)
    known = {name: v3.COLUMNS[name] for name in ("observation.state", "action")}
    known |= dict.fromkeys(v3.VIDEO_KEYS.values(), picture)
    features = {
        key: {"dtype": feature["dtype"], "shape": tuple(feature["shape"]), "names": feature["names"]}
        for key, feature in known.items()
    }
    with tempfile.TemporaryDirectory() as folder, scheduling_kept():
        started = time.perf_counter()
        dataset = LeRobotDataset.create(
            "local/speed", CONTROL_HZ, features, root=Path(folder) / "dataset", use_videos=True, **options
        )
        for frames in episodes:
            for frame in frames:
                dataset.add_frame(dict(frame))
            dataset.save_episode()
        dataset.finalize()
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
