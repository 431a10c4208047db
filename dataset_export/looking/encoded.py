"""An episode's pictures, one by one and encoded, for viewers that decode them themselves.

They are copied as the dataset has them where a stream of them can be decoded; else each becomes a PNG.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction

import av
import cv2
from av.bitstream import BitStreamFilterContext
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, first_line
from dayshift.dataset_export.looking.dataset import VideoPart
from dayshift.types import DayshiftError

# MP4 keeps these codecs' parameter sets apart and counts bytes; a stream has them before each key frame
# and start codes instead (Annex B). AV1 is the same in both.
_TO_STREAM = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb", "av1": "null"}
_LIBRARY_NAMES = {"libdav1d": "av1", "libaom-av1": "av1"}


PNG = "png"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPicture:
    """A picture that can be decoded after those before it, back to a key frame."""

    frame_index: int
    is_keyframe: bool
    data: bytes  # H.264 and H.265 in Annex B, AV1 as low-overhead units, or a PNG file


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPart:
    """All pictures of an episode; `codec` is "h264", "hevc", "av1" or "png".

    `why_png` says why they could not be copied; "" when they were.
    """

    codec: str
    pictures: tuple[EncodedPicture, ...]
    why_png: str = ""


class _CannotCopyError(Exception):
    """These pictures are no stream that viewers take."""


def read_encoded_pictures(part: VideoPart) -> EncodedPart:
    """Copy an episode's pictures out of their video, without decoding them.

    Where viewers could not decode the copy (B-frames, another codec, an episode that does not start with a
    key frame) they are decoded here, and each is a PNG: larger, but without loss. Raises DayshiftError for a
    broken video, or one that lacks a picture.
    """
    try:
        with closing(av.open(str(part.path))) as container:
            stream = container.streams.video[0]
            container.seek(_pts(part, stream, 0), stream=stream)
            try:
                return _copy(part, stream, container)
            except _CannotCopyError as error:
                container.seek(_pts(part, stream, 0), stream=stream)
                return _as_png(part, stream, container, str(error))
    except BROKEN_FILE_ERRORS as error:
        raise DayshiftError(f"{part.path}: {first_line(error)}") from error


def _copy(part: VideoPart, stream: VideoStream, container: InputContainer) -> EncodedPart:
    name = stream.codec_context.name
    codec = _LIBRARY_NAMES.get(name, name)
    if codec not in _TO_STREAM:
        raise _CannotCopyError(f"the codec is {codec}")
    packets = list(_packets_of(part, stream, container.demux(stream)))
    if not packets[0].is_keyframe:
        raise _CannotCopyError("the episode does not start with a key frame")
    bitstream = BitStreamFilterContext(_TO_STREAM[codec], stream)
    pictures = []
    for frame_index, packet in enumerate(packets):
        is_keyframe = packet.is_keyframe
        data = b"".join(bytes(one) for one in bitstream.filter(packet))
        pictures.append(EncodedPicture(frame_index=frame_index, is_keyframe=is_keyframe, data=data))
    return EncodedPart(codec=codec, pictures=tuple(pictures))


def _as_png(part: VideoPart, stream: VideoStream, container: InputContainer, why: str) -> EncodedPart:
    pictures: list[EncodedPicture] = []
    for frame in container.decode(stream):
        assert isinstance(frame, VideoFrame)
        expected = _pts(part, stream, len(pictures))
        if frame.pts is None or frame.pts < expected:
            continue
        if frame.pts > expected:
            break
        _, png = cv2.imencode(".png", frame.to_ndarray(format="rgb24")[..., ::-1])
        pictures.append(EncodedPicture(frame_index=len(pictures), is_keyframe=True, data=png.tobytes()))
        if len(pictures) == part.num_frames:
            return EncodedPart(codec=PNG, pictures=tuple(pictures), why_png=why)
    raise _missing(part, len(pictures))


def _missing(part: VideoPart, frame_index: int) -> DayshiftError:
    return DayshiftError(f"{part.path}: picture {part.first + frame_index} is missing")


def _pts(part: VideoPart, stream: VideoStream, frame_index: int) -> int:
    assert stream.time_base is not None
    return round(Fraction(part.first + frame_index, part.fps) / stream.time_base)


def _packets_of(part: VideoPart, stream: VideoStream, packets: Iterator[Packet]) -> Iterator[Packet]:
    """The packets of the episode's pictures, each once and in order."""
    frame_index = 0
    for packet in packets:
        if packet.pts is None or not packet.size:
            continue
        if packet.pts != packet.dts:
            raise _CannotCopyError("the video has B-frames")
        if packet.pts < _pts(part, stream, frame_index):
            continue
        if packet.pts > _pts(part, stream, frame_index):
            break
        yield packet
        frame_index += 1
        if frame_index == part.num_frames:
            return
    raise _missing(part, frame_index)
