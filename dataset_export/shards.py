"""Files of a dataset that fill up and are followed by the next: parquet and video shards.

A shard is written once, from start to end: adding an episode costs the same however long the dataset
is. An append copies the last video file of each camera, if there is room in it, and goes on in the copy,
so that a dataset has as few video files as can be. Whoever publishes the dataset flushes the files to the
disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import pyarrow as pa
import pyarrow.parquet as pq
from av.packet import Packet

from dayshift.dataset_export.lerobot_v3 import DATA_PATH, FILES_PER_CHUNK, VIDEO_PATH


@dataclass(frozen=True, slots=True, order=True)
class ShardId:
    """chunk-000/file-000 and so on."""

    chunk_index: int = 0
    file_index: int = 0

    def next(self) -> ShardId:
        if self.file_index + 1 == FILES_PER_CHUNK:
            return ShardId(self.chunk_index + 1, 0)
        return ShardId(self.chunk_index, self.file_index + 1)

    def path(self, root: Path, pattern: str, **names: str) -> Path:
        return root / pattern.format(chunk_index=self.chunk_index, file_index=self.file_index, **names)


class ParquetShards:
    """Parquet files of one kind, one row group per table."""

    def __init__(self, root: Path, pattern: str, schema: pa.Schema, first: ShardId, max_bytes: int) -> None:
        self._root, self._pattern, self._schema = root, pattern, schema
        self._max_bytes = max_bytes
        self._current = self._next = first
        self._writer: pq.ParquetWriter | None = None
        self._path = Path()

    @property
    def is_full(self) -> bool:
        return self._writer is not None and self._path.stat().st_size >= self._max_bytes

    def write(self, table: pa.Table) -> ShardId:
        """Append a table and say which shard holds it."""
        if self.is_full:
            self.rotate()
        if self._writer is None:
            self._current, self._next = self._next, self._next.next()
            self._path = self._current.path(self._root, self._pattern)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(self._path, self._schema, compression="snappy")
        self._writer.write_table(table)
        return self._current

    def rotate(self) -> None:
        """Finish the shard; the next table starts another one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedVideo:
    """An episode's pictures as they were encoded, in memory. Two can share a shard if `settings` agree."""

    packets: list[Packet]
    width: int
    height: int
    settings: tuple[object, ...]
    ticks_per_frame: int
    num_bytes: int
    path: Path


def read_encoded(path: Path, *, num_frames: int, fps: int) -> EncodedVideo:
    """Read a video that has one picture for each of `num_frames` control steps.

    Raises ValueError when a picture is missing or there is one too many, OSError for a broken file.
    """
    return _read_packets(path, fps, first=0, num_frames=num_frames, is_whole_file=True)


def read_encoded_part(path: Path, *, first: int, num_frames: int, fps: int) -> EncodedVideo:
    """Read `num_frames` pictures of a shard from picture `first` on. Raises as `read_encoded`."""
    return _read_packets(path, fps, first=first, num_frames=num_frames, is_whole_file=False)


def _read_packets(path: Path, fps: int, *, first: int, num_frames: int, is_whole_file: bool) -> EncodedVideo:
    with closing(av.open(str(path))) as source:
        stream = source.streams.video[0]
        context, time_base = stream.codec_context, stream.time_base
        packets = [packet for packet in source.demux(stream) if packet.size]
    assert time_base is not None
    ticks = Fraction(1) / (time_base * fps)
    expected = [(first + index) * ticks.numerator for index in range(num_frames)]
    if not is_whole_file:
        wanted = set(expected)
        packets = [packet for packet in packets if packet.pts in wanted]
    if ticks.denominator != 1 or [packet.pts for packet in packets] != expected:
        last = first + num_frames - 1
        raise ValueError(f"{path}: expected pictures {first} to {last} at {fps} Hz, each once")
    if packets and not packets[0].is_keyframe:
        raise ValueError(f"{path}: picture {first} cannot be decoded on its own")
    return EncodedVideo(
        packets=packets,
        width=context.width,
        height=context.height,
        settings=(context.name, context.width, context.height, time_base, context.extradata),
        ticks_per_frame=ticks.numerator,
        num_bytes=sum(packet.size for packet in packets),
        path=path,
    )


@dataclass(frozen=True, slots=True)
class VideoPlace:
    """Where an episode's pictures are: a shard, and the first picture's number in it."""

    shard: ShardId
    first_frame: int


class VideoShards:
    """Video files of one camera, filled by copying encoded pictures as they are.

    `last` is the file that the dataset's older version ends with, to go on in; its place under `root`
    is taken by the longer file.
    """

    def __init__(
        self,
        root: Path,
        pattern: str,
        key: str,
        *,
        first: ShardId,
        max_bytes: int,
        last: tuple[ShardId, EncodedVideo] | None = None,
    ) -> None:
        self._root, self._pattern, self._key = root, pattern, key
        self._max_bytes = max_bytes
        self._next = first
        self._last = last
        self._shard: _VideoShard | None = None

    def fits(self, video: EncodedVideo) -> bool:
        """True when the video can be appended to the current shard, or starts the first."""
        return self._shard is None or self._can_follow(self._shard, video)

    def append(self, video: EncodedVideo) -> VideoPlace:
        """Copy an episode's pictures and say where they are."""
        if not self.fits(video):
            self.rotate()
        if self._shard is None:
            self._shard = self._go_on_with_last(video) or self._start(video)
        first_frame = self._shard.num_frames
        self._shard.append(video)
        return VideoPlace(self._shard.shard_id, first_frame)

    def _can_follow(self, before: _VideoShard | EncodedVideo, video: EncodedVideo) -> bool:
        return before.settings == video.settings and before.num_bytes + video.num_bytes <= self._max_bytes

    def _start(self, video: EncodedVideo) -> _VideoShard:
        shard_id, self._next = self._next, self._next.next()
        return _VideoShard(self._path(shard_id), shard_id, video)

    def _go_on_with_last(self, video: EncodedVideo) -> _VideoShard | None:
        last, self._last = self._last, None
        if last is None or not self._can_follow(last[1], video):
            return None
        shard_id, pictures = last
        path = self._path(shard_id)
        path.unlink(missing_ok=True)  # a link to the older version's file, which must not change
        shard = _VideoShard(path, shard_id, pictures)
        shard.append(pictures)
        return shard

    def _path(self, shard_id: ShardId) -> Path:
        return shard_id.path(self._root, self._pattern, video_key=self._key)

    def rotate(self) -> None:
        """Finish the shard; the next episode starts another one."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None


class _VideoShard:
    """One MP4 file, made for videos like the first one."""

    def __init__(self, path: Path, shard_id: ShardId, like: EncodedVideo) -> None:
        self.shard_id = shard_id
        self.settings = like.settings
        self.num_frames = 0
        self.num_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w", format="mp4")
        with av.open(str(like.path)) as source:
            template = source.streams.video[0]
            self._stream = self._container.add_stream_from_template(template, opaque=True)
            self._stream.time_base = template.time_base

    def append(self, video: EncodedVideo) -> None:
        ticks = video.ticks_per_frame
        for number, packet in enumerate(video.packets, start=self.num_frames):
            # Times come from whole picture counts, so no rounding error ever adds up.
            packet.pts = packet.dts = number * ticks
            packet.duration = ticks
            packet.stream = self._stream
            self._container.mux(packet)
        self.num_frames += len(video.packets)
        self.num_bytes += video.num_bytes

    def close(self) -> None:
        self._container.close()


class ShardSet:
    """The shards of a dataset that are being filled: the rows, and one video per camera.

    With `together` they change files at the same episodes, so that a file has the same number and an
    episode the same times everywhere. `first` gives each kind's first free shard, `last` the video files
    to go on in.
    """

    def __init__(
        self,
        root: Path,
        schema: pa.Schema,
        video_keys: Sequence[str],
        *,
        fps: int,
        first: Callable[[str], ShardId],
        last: Mapping[str, tuple[ShardId, EncodedVideo]],
        data_file_bytes: int,
        video_file_bytes: int,
        together: bool,
    ) -> None:
        firsts = {prefix: first(prefix) for prefix in ("data", *(f"videos/{key}" for key in video_keys))}
        if together:
            firsts = dict.fromkeys(firsts, max(firsts.values()))
        self._fps, self._together = fps, together
        self._rows = ParquetShards(root, DATA_PATH, schema, firsts["data"], data_file_bytes)
        self._videos = {
            key: VideoShards(
                root,
                VIDEO_PATH,
                key,
                first=firsts[f"videos/{key}"],
                max_bytes=video_file_bytes,
                last=last.get(key),
            )
            for key in video_keys
        }

    def add(self, table: pa.Table, videos: Mapping[str, EncodedVideo]) -> dict[str, int | float]:
        """Write an episode's rows and pictures; its file and time columns of meta/episodes."""
        if self._together and not self._has_room(videos):
            self.finish()
        shard = self._rows.write(table)
        columns: dict[str, int | float] = {
            "data/chunk_index": shard.chunk_index,
            "data/file_index": shard.file_index,
        }
        for key, video in videos.items():
            place = self._videos[key].append(video)
            columns |= {
                f"videos/{key}/chunk_index": place.shard.chunk_index,
                f"videos/{key}/file_index": place.shard.file_index,
                f"videos/{key}/from_timestamp": place.first_frame / self._fps,
                f"videos/{key}/to_timestamp": (place.first_frame + len(video.packets)) / self._fps,
            }
        return columns

    def _has_room(self, videos: Mapping[str, EncodedVideo]) -> bool:
        return not self._rows.is_full and all(self._videos[key].fits(video) for key, video in videos.items())

    def finish(self) -> None:
        """Finish every file; what is added next goes into new ones."""
        for shards in (self._rows, *self._videos.values()):
            shards.rotate()
