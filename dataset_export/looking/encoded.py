"""An episode's pictures as they were encoded, one by one, for viewers that decode them themselves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction

import av
from av.bitstream import BitStreamFilterContext
from av.packet import Packet
from av.video.stream import VideoStream

from dayshift.dataset_export.errors import BROKEN_FILE_ERRORS, first_line
from dayshift.dataset_export.looking.dataset import VideoPart
from dayshift.types import DayshiftError

# MP4 keeps these codecs' parameter sets apart and counts bytes; a stream has them before each key frame
# and start codes instead (Annex B). AV1 is the same in both.
_TO_STREAM = {"h264": "h264_mp4toannexb", "hevc": "hevc_mp4toannexb", "av1": "null"}
_LIBRARY_NAMES = {"libdav1d": "av1", "libaom-av1": "av1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPicture:
    """A picture that can be decoded after those before it, back to a key frame."""

    frame_index: int
    is_keyframe: bool
    data: bytes  # H.264 and H.265 in Annex B, AV1 as low-overhead units


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPart:
    """All pictures of an episode; `codec` is "h264", "hevc" or "av1"."""

    codec: str
    pictures: tuple[EncodedPicture, ...]


def read_encoded_pictures(part: VideoPart) -> EncodedPart:
    """Copy an episode's pictures out of their video; nothing is decoded.

    Raises DayshiftError for a broken video, another codec, B-frames (no viewer takes them in a stream),
    or an episode that does not start with a key frame.
    """
    try:
        with closing(av.open(str(part.path))) as container:
            stream = container.streams.video[0]
            codec = _codec_name(stream, part)
            container.seek(_pts(part, stream, 0), stream=stream)
            packets = list(_packets_of(part, stream, container.demux(stream)))
            return EncodedPart(codec=codec, pictures=tuple(_to_stream(codec, stream, packets, part)))
    except BROKEN_FILE_ERRORS as error:
        raise DayshiftError(f"{part.path}: {first_line(error)}") from error


def _codec_name(stream: VideoStream, part: VideoPart) -> str:
    name = stream.codec_context.name
    codec = _LIBRARY_NAMES.get(name, name)
    if codec not in _TO_STREAM:
        raise DayshiftError(f"{part.path}: codec {codec}, allowed: {', '.join(_TO_STREAM)}")
    return codec


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
            raise DayshiftError(f"{part.path}: has B-frames, which cannot be copied into a stream")
        if packet.pts < _pts(part, stream, frame_index):
            continue
        if packet.pts > _pts(part, stream, frame_index):
            break
        yield packet
        frame_index += 1
        if frame_index == part.num_frames:
            return
    raise DayshiftError(f"{part.path}: picture {part.first + frame_index} is missing")


def _to_stream(
    codec: str, stream: VideoStream, packets: list[Packet], part: VideoPart
) -> Iterator[EncodedPicture]:
    if not packets[0].is_keyframe:
        raise DayshiftError(f"{part.path}: picture {part.first} cannot be decoded on its own")
    bitstream = BitStreamFilterContext(_TO_STREAM[codec], stream)
    for frame_index, packet in enumerate(packets):
        is_keyframe = packet.is_keyframe
        data = b"".join(bytes(one) for one in bitstream.filter(packet))
        yield EncodedPicture(frame_index=frame_index, is_keyframe=is_keyframe, data=data)
