"""H.264 and AV1 through PyAV with exact frame numbers.

A video's time unit is one control step: the picture of control step n has presentation time n / fps,
as an integer, so pictures taken at only some control steps still say which ones they show.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self, cast

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray

from dayshift.dataset_export.scheduling import scheduling_kept
from dayshift.dataset_export.stats import PictureCounter

Image = NDArray[np.uint8]  # (height, width, 3), RGB


@dataclass(frozen=True, slots=True)
class Codec:
    """An encoder and its settings. No B-frames: pictures are stored in the order they are shown."""

    name: str
    encoder: str
    gop_size: int  # pictures from one key frame to the next: small is quick to seek, large is small
    options: dict[str, str] = field(default_factory=dict)


H264 = Codec("h264", "libx264", 2, {"preset": "veryfast", "crf": "23", "bf": "0"})
AV1 = Codec("av1", "libsvtav1", 2, {"preset": "12", "crf": "30", "svtav1-params": "pred-struct=1:lp=1"})
CODECS = {codec.name: codec for codec in (H264, AV1)}


def counts_path(video: Path) -> Path:
    """Where a video's channel values are kept, for its statistics."""
    return video.with_suffix(".counts.json")


class VideoWriter:
    """Encodes pictures into one MP4 file and counts their channel values beside it.

    `close` finishes both files.
    """

    def __init__(self, path: Path, *, width: int, height: int, fps: int, codec: Codec = H264) -> None:
        self.path = path
        self.num_frames = 0
        self._time_base = Fraction(1, fps)
        self._last_index = -1
        self._counter = PictureCounter()
        self._shape = (height, width, 3)
        self._container = av.open(str(path), "w", format="mp4")
        stream = self._container.add_stream(codec.encoder, rate=fps, options=codec.options)
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = codec.gop_size
        stream.codec_context.thread_count = 1  # one writer serves many cameras
        stream.codec_context.time_base = self._time_base
        self._stream = stream

    def write(self, image: Image, index: int) -> None:
        """Append the picture of control step `index`; indices must rise.

        Raises ValueError for a picture of another size or an index that does not rise, OSError when
        the file cannot be written.
        """
        if image.shape != self._shape or image.dtype != np.uint8:
            raise ValueError(
                f"{self.path.name}: expected uint8 {self._shape}, got {image.dtype} {image.shape}"
            )
        if index <= self._last_index:
            raise ValueError(f"{self.path.name}: picture {index} after picture {self._last_index}")
        frame = VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
        frame.pts, frame.time_base = index, self._time_base
        with scheduling_kept() if self.num_frames == 0 else contextlib.nullcontext():  # it opens the encoder
            self._container.mux(self._stream.encode(frame))
        self._counter.add(image)
        self._last_index = index
        self.num_frames += 1

    def close(self) -> None:
        """Write what the encoder still holds and finish the files. Raises OSError."""
        try:
            self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()
        self._counter.write(counts_path(self.path))

    def discard(self) -> None:
        """Let go of a file that will be deleted; that it cannot be finished does not matter."""
        with contextlib.suppress(OSError):
            self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


class VideoReader:
    """Reads an MP4 written here (or any constant-rate one) by control step."""

    def __init__(self, path: Path, *, fps: int) -> None:
        self.path = path
        self._fps = fps
        self._container = av.open(str(path))
        self._stream = self._container.streams.video[0]
        self._stream.codec_context.thread_count = 1

    @property
    def frame_indices(self) -> list[int]:
        """The control steps shown, in order; read from the packets, nothing is decoded."""
        self._container.seek(0, stream=self._stream)
        return [
            self._index(packet.pts)
            for packet in self._container.demux(self._stream)
            if packet.pts is not None and packet.size
        ]

    def frames(self) -> Iterator[tuple[int, Image]]:
        """Every (control step, picture), in order."""
        self._container.seek(0, stream=self._stream)
        for frame in self._container.decode(self._stream):
            assert isinstance(frame, VideoFrame)
            yield self._index(frame.pts), _to_rgb(frame)

    def frame(self, index: int) -> Image:
        """The picture of control step `index`. Raises KeyError when the video does not show it."""
        return _to_rgb(self._decode(index))

    def digest(self, index: int) -> str:
        """A hash of the picture of control step `index` as decoded, before any colour conversion.

        Decoding is exact everywhere; conversion to RGB depends on the processor.
        """
        return hashlib.sha256(self._decode(index).to_ndarray().tobytes()).hexdigest()[:32]

    def _decode(self, index: int) -> VideoFrame:
        assert self._stream.time_base is not None
        target = round(Fraction(index, self._fps) / self._stream.time_base)
        self._container.seek(target, stream=self._stream)
        for frame in self._container.decode(self._stream):
            assert isinstance(frame, VideoFrame)
            found = self._index(frame.pts)
            if found == index:
                return frame
            if found > index:
                break
        raise KeyError(f"{self.path.name} shows no control step {index}")

    def _index(self, pts: int | None) -> int:
        assert pts is not None
        assert self._stream.time_base is not None
        return round(pts * self._stream.time_base * self._fps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._container.close()


def _to_rgb(frame: VideoFrame) -> Image:
    return cast(Image, frame.to_ndarray(format="rgb24"))
