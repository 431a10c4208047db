"""What one attempt looks like on disk, written and read.

    attempts/<attempt_id>/
        frames.parquet     one row per control step: states, action, reward, success, time
        agentview.mp4      pictures rendered live, if any, one file per camera
        wrist.mp4
        *.counts.json      how often each channel value occurs in a video, for statistics
        start.json         the rollout's spec and start: what a re-render or a replay needs

While an attempt is written its folder is called `<attempt_id>.part`; it loses the suffix in one
rename, after every file in it has reached the disk. So a folder without the suffix is whole.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dayshift.sim.types import Camera, Frame, RolloutSpec, RolloutStart

ATTEMPTS = "attempts"
FRAMES = "frames.parquet"
START = "start.json"
PART_SUFFIX = ".part"
ROWS_PER_GROUP = 64  # 3.2 s at 20 Hz are held in memory before they go to the file

_ATTEMPT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}")


def attempt_folder(run_dir: Path, attempt_id: str) -> Path:
    """The folder of a finished attempt. Raises ValueError for an id that is no safe file name."""
    if not _ATTEMPT_ID.fullmatch(attempt_id) or attempt_id.endswith(PART_SUFFIX):
        raise ValueError(f"attempt id {attempt_id!r}: expected letters, digits, '.', '_' and '-'")
    return run_dir / ATTEMPTS / attempt_id


def part_folder(run_dir: Path, attempt_id: str) -> Path:
    """The folder of an attempt that is still being written."""
    folder = attempt_folder(run_dir, attempt_id)
    return folder.with_name(folder.name + PART_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFile:
    """Content of start.json."""

    fps: int
    spec: RolloutSpec
    start: RolloutStart


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameTable:
    """All frames of an attempt, column by column; row n is control step n."""

    t: NDArray[np.float64]  # (n,): seconds on the run clock when the frame was recorded
    sim_state: NDArray[np.float64]  # (n, size of the simulator's state)
    robot_state: NDArray[np.float32]  # (n, 8)
    action: NDArray[np.float32]  # (n, 7)
    reward: NDArray[np.float32]  # (n,)
    success: NDArray[np.bool_]  # (n,)

    def __len__(self) -> int:
        return len(self.t)


class FrameTableWriter:
    """Streams frames into frames.parquet, a row group at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: pq.ParquetWriter | None = None
        self._rows: list[tuple[float, Frame]] = []

    def append(self, t: float, frame: Frame) -> None:
        self._rows.append((t, frame))
        if len(self._rows) == ROWS_PER_GROUP:
            self._write_rows()

    def close(self) -> None:
        """Write the rest and the footer."""
        if self._rows:
            self._write_rows()
        if self._writer is not None:
            self._writer.close()

    def discard(self) -> None:
        """Let go of a file that will be deleted; that it cannot be finished does not matter."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _write_rows(self) -> None:
        table = _to_table(self._rows)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._rows.clear()


def read_frames(path: Path) -> FrameTable:
    """Read frames.parquet. The arrays are the caller's own and writeable, as MuJoCo wants its states."""
    table = pq.read_table(path)

    def vectors(name: str) -> NDArray[Any]:
        column = table.column(name).combine_chunks()
        return column.flatten().to_numpy().reshape(len(column), -1).copy()

    def scalars(name: str) -> NDArray[Any]:
        return table.column(name).to_numpy().copy()

    return FrameTable(
        t=scalars("t"),
        sim_state=vectors("sim_state"),
        robot_state=vectors("robot_state"),
        action=vectors("action"),
        reward=scalars("reward"),
        success=scalars("success"),
    )


def write_start(path: Path, start: StartFile) -> None:
    """Write start.json; floats keep every bit."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(start, enc_hook=_encode_array), indent=1))


def read_start(path: Path) -> StartFile:
    """Read start.json."""
    return msgspec.json.decode(path.read_bytes(), type=StartFile, dec_hook=_decode_array)


def video_path(folder: Path, camera: Camera) -> Path:
    """Where an attempt keeps a camera's live pictures."""
    return folder / f"{camera}.mp4"


def _to_table(rows: list[tuple[float, Frame]]) -> pa.Table:
    frames = [frame for _, frame in rows]
    return pa.table(
        {
            "frame_index": pa.array([frame.index for frame in frames], pa.int64()),
            "t": pa.array([t for t, _ in rows], pa.float64()),
            "sim_state": _vectors([frame.sim_state for frame in frames], pa.float64()),
            "robot_state": _vectors([frame.robot_state for frame in frames], pa.float32()),
            "action": _vectors([frame.action for frame in frames], pa.float32()),
            "reward": pa.array([frame.reward for frame in frames], pa.float32()),
            "success": pa.array([frame.success for frame in frames], pa.bool_()),
        }
    )


def _vectors(values: list[NDArray[Any]], dtype: pa.DataType) -> pa.FixedSizeListArray:
    stacked = np.stack(values)
    return pa.FixedSizeListArray.from_arrays(pa.array(stacked.ravel(), dtype), stacked.shape[1])


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotImplementedError(f"cannot write {type(value)}")


def _decode_array(kind: Any, value: Any) -> Any:
    return np.asarray(value, dtype=np.float64)
