"""The recorder: writes each attempt into the run folder while it happens.

One `Recorder` writes for all robots of a run. `writer_process.RecorderProcess` gives every robot's
thread the same three calls and runs the recorder in a process of its own.

Order on the disk: the attempt's files are written and flushed, then their folder, then the folder
is renamed to its final name, then `attempts/` is flushed; only then does `on_end` return, and only
after that may the caller commit the attempt's outcome. A kill at any moment loses at most the
attempts in flight; `repair.repair_run` clears them away.
"""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.durable import LOST_RUN_PATIENCE_S, flush_to_disk, only_writer
from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.video import H264, Codec, VideoWriter
from dayshift.sim.types import CONTROL_HZ, Camera, Frame, RolloutSpec, RolloutStart


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the files of a finished attempt hold."""

    attempt_id: str
    num_frames: int
    num_images: dict[Camera, int]  # pictures rendered live, by camera
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _OpenAttempt:
    folder: Path
    table: files.FrameTableWriter
    videos: dict[Camera, VideoWriter] = field(default_factory=dict)
    num_frames: int = 0


class Recorder:
    """Writes attempts, several at a time, into one run folder; one recorder per folder at a time.

    Calls per attempt: `on_start`, `on_frame` for every control step in order, then `on_end` or
    `on_abort`; at the end `close`, or use it as a context manager. Raises RecordingError when frames
    are missing or another process writes in the folder, OSError when the disk refuses.
    """

    def __init__(self, run_dir: Path, *, fps: int = CONTROL_HZ, codec: Codec = H264) -> None:
        self._run_dir = run_dir
        self._fps = fps
        self._codec = codec
        self._open: dict[str, _OpenAttempt] = {}
        (run_dir / files.ATTEMPTS).mkdir(parents=True, exist_ok=True)
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(only_writer(run_dir, patience_s=LOST_RUN_PATIENCE_S))

    def on_start(self, attempt_id: str, spec: RolloutSpec, start: RolloutStart) -> None:
        if files.attempt_folder(self._run_dir, attempt_id).exists():
            raise RecordingError(f"attempt {attempt_id} is already recorded in {self._run_dir}")
        folder = files.part_folder(self._run_dir, attempt_id)
        folder.mkdir()
        table = files.FrameTableWriter(folder / files.FRAMES)
        self._open[attempt_id] = _OpenAttempt(folder=folder, table=table)
        files.write_start(folder / files.START, files.StartFile(fps=self._fps, spec=spec, start=start))

    def on_frame(self, attempt_id: str, t: float, frame: Frame) -> None:
        """Append one control step, recorded at `t` seconds on the run clock."""
        attempt = self._open[attempt_id]
        if frame.index != attempt.num_frames:
            raise RecordingError(
                f"attempt {attempt_id}: frame {frame.index} came where frame {attempt.num_frames} was due"
            )
        attempt.table.append(t, frame)
        for camera, image in frame.images.items():
            video = attempt.videos.get(camera) or self._start_video(attempt, camera, image)
            video.write(image, frame.index)
        attempt.num_frames += 1

    def on_end(self, attempt_id: str) -> Recording:
        """Finish the attempt's files; when this returns they are durable."""
        attempt = self._open[attempt_id]
        if attempt.num_frames == 0:
            self.on_abort(attempt_id)
            return Recording(attempt_id=attempt_id, num_frames=0, num_images={}, num_bytes=0)
        attempt.table.close()
        for video in attempt.videos.values():
            video.close()
        num_bytes = self._publish(attempt_id, attempt.folder)
        del self._open[attempt_id]
        return Recording(
            attempt_id=attempt_id,
            num_frames=attempt.num_frames,
            num_images={camera: video.num_frames for camera, video in attempt.videos.items()},
            num_bytes=num_bytes,
        )

    def on_abort(self, attempt_id: str) -> None:
        """Throw away what was written of an attempt."""
        attempt = self._open.pop(attempt_id, None)
        if attempt is None:
            return
        for stream in (attempt.table, *attempt.videos.values()):
            stream.discard()
        shutil.rmtree(attempt.folder)

    def close(self) -> None:
        """Throw away every attempt that was not ended."""
        for attempt_id in list(self._open):
            self.on_abort(attempt_id)
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_video(self, attempt: _OpenAttempt, camera: Camera, image: NDArray[np.uint8]) -> VideoWriter:
        height, width = image.shape[:2]
        path = files.video_path(attempt.folder, camera)
        video = VideoWriter(path, width=width, height=height, fps=self._fps, codec=self._codec)
        attempt.videos[camera] = video
        return video

    def _publish(self, attempt_id: str, part: Path) -> int:
        paths = sorted(part.iterdir())
        for path in paths:
            flush_to_disk(path)
        num_bytes = sum(path.stat().st_size for path in paths)
        flush_to_disk(part)
        final = files.attempt_folder(self._run_dir, attempt_id)
        part.rename(final)
        flush_to_disk(final.parent)
        return num_bytes
