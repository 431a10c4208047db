"""LeRobot's dataset format v3.0 on disk: paths, features, schemas, info.json.

meta/info.json  meta/stats.json  meta/tasks.parquet  meta/episodes/chunk-000/file-000.parquet
data/chunk-000/file-000.parquet        one row per frame, one row group per episode
videos/<feature>/chunk-000/file-000.mp4
meta/attempts.parquet                  ours: what is known of each episode, by attempt
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from dayshift.dataset_export.video import Codec
from dayshift.sim.types import Camera
from dayshift.types import DayshiftError

VERSION = "v3.0"
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
ATTEMPTS, CARD = "meta/attempts.parquet", "README.md"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
FILES_PER_CHUNK = 1000
DATA_FILE_MB, VIDEO_FILE_MB = 100, 200

VIDEO_KEYS: dict[Camera, str] = {  # the names that LIBERO policies know
    "agentview": "observation.images.image",
    "wrist": "observation.images.image2",
}
ROBOT_TYPE = "panda"

_AXES = ["x", "y", "z", "axis_angle1", "axis_angle2", "axis_angle3"]


def _feature(dtype: str, size: int = 1, names: list[str] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [size], "names": names}


COLUMNS: dict[str, dict[str, Any]] = {
    "observation.state": _feature("float32", 8, [*_AXES, "gripper1", "gripper2"]),
    "action": _feature("float32", 7, [*_AXES, "gripper"]),
    "next.reward": _feature("float32"),
    "next.success": _feature("bool"),
    "next.done": _feature("bool"),
    "recorded_at": _feature("float64"),  # seconds on the run clock: measured, unlike `timestamp`
    "attempt_id": _feature("string"),  # survives the editing tools, which drop what they do not know
    "timestamp": _feature("float32"),
    "frame_index": _feature("int64"),
    "episode_index": _feature("int64"),
    "index": _feature("int64"),
    "task_index": _feature("int64"),
}
PERSISTENT, EVENTS = "language_persistent", "language_events"
LANGUAGE = {name: {"dtype": "language", "shape": [1], "names": None} for name in (PERSISTENT, EVENTS)}
NUMERIC_COLUMNS = tuple(name for name, feature in COLUMNS.items() if feature["dtype"] != "string")


class DatasetInfo(msgspec.Struct, kw_only=True):
    """Content of meta/info.json."""

    codebase_version: str
    fps: int
    features: dict[str, dict[str, Any]]
    total_episodes: int = 0
    total_frames: int = 0
    total_tasks: int = 0
    chunks_size: int = FILES_PER_CHUNK
    data_files_size_in_mb: int = DATA_FILE_MB
    video_files_size_in_mb: int = VIDEO_FILE_MB
    data_path: str = DATA_PATH
    video_path: str | None = VIDEO_PATH
    robot_type: str | None = None
    splits: dict[str, str] = {}
    tools: list[dict[str, Any]] | None = None

    @property
    def video_keys(self) -> list[str]:
        """Features that are videos."""
        return [key for key, feature in self.features.items() if feature["dtype"] == "video"]

    def to_json(self) -> bytes:
        fields = msgspec.to_builtins(self)
        if self.tools is None:
            del fields["tools"]  # readers then fall back to their own
        return msgspec.json.format(msgspec.json.encode(fields), indent=4)


def read_info(root: Path) -> DatasetInfo:
    """Read meta/info.json. Raises DayshiftError when there is no v3.0 dataset."""
    path = root / INFO
    if not path.is_file():
        raise DayshiftError(f"{root}: no dataset here (expected {INFO})")
    try:
        info = msgspec.json.decode(path.read_bytes(), type=DatasetInfo)
    except msgspec.DecodeError as error:
        raise DayshiftError(f"{path}: {error}") from error
    if info.codebase_version != VERSION:
        raise DayshiftError(f"{path}: codebase_version {info.codebase_version}, expected {VERSION}")
    return info


def video_feature(*, height: int, width: int, fps: int, codec: Codec) -> dict[str, Any]:
    """The entry of a camera in info.json, as LeRobot's own writer makes it."""
    return {
        "dtype": "video",
        "shape": [height, width, 3],
        "names": ["height", "width", "channels"],
        "info": {
            "video.height": height,
            "video.width": width,
            "video.codec": codec.name,
            "video.pix_fmt": "yuv420p",
            "video.fps": fps,
            "video.channels": 3,
            "has_audio": False,
            "video.g": codec.gop_size,
            "video.crf": int(codec.options["crf"]),
            "video.preset": codec.options["preset"],
            "video.fast_decode": 0,
            "video.video_backend": "pyav",
            "video.extra_options": {},
            "is_depth_map": False,
        },
    }


def data_schema(features: dict[str, dict[str, Any]]) -> pa.Schema:
    """Arrow schema of the data files, with the metadata that the library `datasets` looks for.

    Written out here: importing `datasets` takes longer than an export.
    """
    columns = {key: _column(key, feature) for key, feature in features.items() if feature["dtype"] != "video"}
    described = {key: kind for key, (_, kind) in columns.items()}
    return pa.schema(
        [pa.field(key, arrow) for key, (arrow, _) in columns.items()],
        metadata={"huggingface": json.dumps({"info": {"features": described}})},
    )


_Column = tuple[pa.DataType, dict[str, Any]]  # what Arrow and what `datasets` call a column's type
_ARROW_TYPES = {"float32": pa.float32(), "float64": pa.float64(), "int64": pa.int64(), "bool": pa.bool_()}


def _column(key: str, feature: dict[str, Any]) -> _Column:
    if feature["dtype"] == "language":
        return _list_of(_language_row(has_timestamp=key == PERSISTENT))
    (size,) = feature["shape"]
    value = _value(feature["dtype"])
    return value if size == 1 else _list_of(value, size)


def _value(dtype: str) -> _Column:
    return _ARROW_TYPES.get(dtype, pa.string()), {"dtype": dtype, "_type": "Value"}


def _list_of(item: _Column, length: int = -1) -> _Column:
    arrow, kind = item
    fixed = {"length": length} if length >= 0 else {}
    return pa.list_(arrow, length), {"feature": kind} | fixed | {"_type": "List"}


def _language_row(*, has_timestamp: bool) -> _Column:
    fields = {name: _value("string") for name in ("role", "content", "style")}
    if has_timestamp:
        fields["timestamp"] = _value("float32")
    fields["camera"] = _value("string")
    fields["tool_calls"] = _list_of((pa.json_(), {"_type": "Json"}))
    return (
        pa.struct([(name, arrow) for name, (arrow, _) in fields.items()]),
        {name: kind for name, (_, kind) in fields.items()},
    )


def tasks_table(tasks: Sequence[str]) -> pa.Table:
    """meta/tasks.parquet: readers take a task by its row, and its name from pandas' index."""

    def column(name: str, kind: str, numpy_type: str) -> dict[str, Any]:
        return {
            "name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_type, "metadata": None,
        }  # fmt: skip

    described = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [column("task_index", "int64", "int64"), column("task", "unicode", "object")],
    }
    columns = {"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())}
    return pa.table(columns).replace_schema_metadata({"pandas": json.dumps(described)})
