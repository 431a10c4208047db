"""Which picture belongs to a moment of a run, and the picture itself as JPEG.

    moment ─► attempt ─► control step (frames.parquet) ─► the newest recorded picture up to it (mp4),
                                                          or that very step, rendered from its state

Pictures are shown as somebody before the scene sees it: recorded ones are the upright image mirrored
(LIBERO's convention for policies), so they are mirrored back here.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.video import VideoReader
from dayshift.sim.types import Camera
from dayshift.webui.records import AttemptRecord
from dayshift.webui.run_index import RobotIndex

JPEG_QUALITY = 82
_MAX_OPEN_VIDEOS = 64
_MAX_TIMES = 2048
_MAX_JPEGS = 4096  # about 8 kB each


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a robot's cameras show at a time: control step `index` of an attempt.

    `t` is that frame's own time. `is_over`: the attempt has ended, and the robot waits for its planner.
    """

    attempt_id: str
    index: int
    num_frames: int
    t: float
    is_over: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A camera's picture for a moment. `index` is the control step it shows."""

    camera: Camera
    index: int
    jpeg: bytes


class Pictures:
    """Pictures of one recorded run. Used by one thread. Close it after use."""

    def __init__(self, run_dir: Path, fps: int) -> None:
        self._run_dir = run_dir
        self._fps = fps
        self._times: _Cache[str, NDArray[np.float64]] = _Cache(_MAX_TIMES)
        self._videos: _Cache[Path, _Video] = _Cache(_MAX_OPEN_VIDEOS, on_drop=lambda video: video.close())
        self._jpegs: _Cache[tuple[str, Camera, int], bytes] = _Cache(_MAX_JPEGS)

    def moment(self, robot: RobotIndex, t: float) -> Moment | None:
        """What the robot's cameras show at `t`; None before its first recorded attempt."""
        place = bisect.bisect_right(robot.starts, t) - 1
        while place >= 0:
            attempt = robot.attempts[place]
            times = self.frame_times(attempt.attempt_id)
            index = int(np.searchsorted(times, t, "right")) - 1
            if index >= 0:
                return self._moment(attempt, times, index, is_over=t > attempt.end_s)
            place -= 1  # it broke before its first frame, or has not come to it
        return None

    def neighbour(self, robot: RobotIndex, t: float, delta: int) -> float:
        """The time of the control step that is `delta` steps after the one shown at `t`.

        Goes on into the attempt before or after; stays at the robot's first and last frame.
        """
        place = max(0, bisect.bisect_right(robot.starts, t) - 1)
        if not robot.attempts:
            return t
        times = self.frame_times(robot.attempts[place].attempt_id)
        index = int(np.searchsorted(times, t, "right")) - 1 + delta
        while index >= len(times) and place + 1 < len(robot.attempts):
            index -= len(times)
            place += 1
            times = self.frame_times(robot.attempts[place].attempt_id)
        while index < 0 and place > 0:
            place -= 1
            times = self.frame_times(robot.attempts[place].attempt_id)
            index += len(times)
        return float(times[min(max(index, 0), len(times) - 1)]) if len(times) else t

    def frame_times(self, attempt_id: str) -> NDArray[np.float64]:
        """Run-clock time of each control step of an attempt; empty when it was not recorded."""
        if (times := self._times.get(attempt_id)) is None:
            path = files.attempt_folder(self._run_dir, attempt_id) / files.FRAMES
            times = _read_times(path) if path.is_file() else np.empty(0)
            self._times.put(attempt_id, times)
        return times

    def recorded(self, moment: Moment, cameras: tuple[Camera, ...]) -> list[Picture]:
        """The newest recorded picture of each camera up to the moment; none where nothing is recorded."""
        found = []
        for camera in cameras:
            video = self._video(moment.attempt_id, camera)
            index = video.newest(moment.index) if video else None
            if video and index is not None:
                found.append(
                    Picture(camera=camera, index=index, jpeg=self._jpeg(moment, video, camera, index))
                )
        return found

    def _jpeg(self, moment: Moment, video: _Video, camera: Camera, index: int) -> bytes:
        key = (moment.attempt_id, camera, index)
        if (jpeg := self._jpegs.get(key)) is None:
            jpeg = encode_jpeg(video.reader.frame(index))
            self._jpegs.put(key, jpeg)
        return jpeg

    def _moment(
        self, attempt: AttemptRecord, times: NDArray[np.float64], index: int, *, is_over: bool
    ) -> Moment:
        return Moment(
            attempt_id=attempt.attempt_id,
            index=index,
            num_frames=len(times),
            t=float(times[index]),
            is_over=is_over,
        )

    def _video(self, attempt_id: str, camera: Camera) -> _Video | None:
        folder = files.attempt_folder(self._run_dir, attempt_id)
        for path in (folder / f"{camera}.dense.h264.mp4", files.video_path(folder, camera)):
            if (video := self._videos.get(path)) is not None:
                return video
            if path.is_file():
                video = _Video(path, self._fps)
                self._videos.put(path, video)
                return video
        return None

    def close(self) -> None:
        self._videos.clear()


class _Video:
    """An open video and the control steps that it shows."""

    def __init__(self, path: Path, fps: int) -> None:
        self.reader = VideoReader(path, fps=fps)
        self._indices = self.reader.frame_indices

    def newest(self, index: int) -> int | None:
        """The last shown control step up to `index`."""
        place = bisect.bisect_right(self._indices, index) - 1
        return self._indices[place] if place >= 0 else None

    def close(self) -> None:
        self.reader.__exit__()


class _Cache[K, V]:
    """Keeps the values used last."""

    def __init__(self, max_size: int, on_drop: Callable[[V], Any] = lambda _: None) -> None:
        self._max_size = max_size
        self._on_drop = on_drop
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        return None

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        if len(self._values) > self._max_size:
            self._on_drop(self._values.popitem(last=False)[1])

    def clear(self) -> None:
        while self._values:
            self._on_drop(self._values.popitem()[1])


def _read_times(path: Path) -> NDArray[np.float64]:
    """Column `t` of frames.parquet, without loading pandas as pyarrow's simpler calls do (seconds)."""
    column = pq.ParquetFile(path).read(columns=["t"], use_threads=False).column("t").combine_chunks()
    return np.frombuffer(column.buffers()[1], np.float64, count=len(column))


def encode_jpeg(image: NDArray[np.uint8]) -> bytes:
    """A recorded picture, RGB (height, width, 3), as the JPEG that the page shows."""
    as_seen = image[:, ::-1]
    _, jpeg = cv2.imencode(".jpg", as_seen[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return jpeg.tobytes()
