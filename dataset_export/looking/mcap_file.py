"""An episode as an MCAP file for Foxglove: videos by stream copy, curves and words on one time axis.

Topics: a feature's name with slashes. Cameras are foxglove.CompressedVideo, or foxglove.CompressedImage
where the video cannot be copied; curves are JSON objects with one number per dimension; /planner is a
foxglove.Log of what was said, and how the attempt ended. The facts of the attempt are the metadata record
"attempt". Time 0 is the episode's first frame.
"""

from __future__ import annotations

from pathlib import Path

import foxglove
from foxglove import messages
from foxglove.channels import CompressedImageChannel, CompressedVideoChannel, LogChannel

from dayshift.dataset_export.looking.dataset import Curve, Dataset, Episode
from dayshift.dataset_export.looking.encoded import PNG, EncodedPart, read_encoded_pictures
from dayshift.dataset_export.looking.viewer_files import ending, entity, new_file, not_copied, time_ns

_FORMATS = {"h264": "h264", "hevc": "h265", "av1": "av1"}


def write_mcap(dataset: Dataset, episode_index: int, to: Path) -> list[str]:
    """Write an episode; says of which cameras the pictures could not be copied.

    Raises DayshiftError when the episode cannot be read or `to` not be written.
    """
    episode = dataset.episode(episode_index)
    videos = {
        camera: read_encoded_pictures(dataset.video(camera, episode_index)) for camera in dataset.cameras
    }
    context = foxglove.Context()
    topics = [
        *(_camera_topic(context, camera, video) for camera, video in videos.items()),
        *(_CurveTopic(context, curve) for curve in episode.curves),
        _PlannerTopic(context, episode),
    ]
    with (
        new_file(to) as part,
        foxglove.open_mcap(part, allow_overwrite=True, context=context) as writer,
    ):
        writer.write_metadata("attempt", _facts(episode))
        for frame_index in range(episode.entry.num_frames):
            for topic in topics:
                topic.log(frame_index, time_ns(frame_index, episode.fps))
    return not_copied(videos)


def _facts(episode: Episode) -> dict[str, str]:
    entry = episode.entry
    facts = {"episode": entry.episode_index, "task": entry.task, "frames": entry.num_frames}
    return {name: str(value) for name, value in (facts | dict(entry.facts)).items()}


def _camera_topic(context: foxglove.Context, camera: str, video: EncodedPart) -> _VideoTopic | _ImageTopic:
    topic = _ImageTopic if video.codec == PNG else _VideoTopic
    return topic(context, camera, video)


class _VideoTopic:
    def __init__(self, context: foxglove.Context, camera: str, video: EncodedPart) -> None:
        self._camera, self._video = camera, video
        self._channel = CompressedVideoChannel(f"/{entity(camera)}", context=context)

    def log(self, frame_index: int, time: int) -> None:
        picture = messages.CompressedVideo(
            timestamp=_timestamp(time),
            frame_id=self._camera,
            data=self._video.pictures[frame_index].data,
            format=_FORMATS[self._video.codec],
        )
        self._channel.log(picture, log_time=time)


class _ImageTopic:
    def __init__(self, context: foxglove.Context, camera: str, video: EncodedPart) -> None:
        self._camera, self._video = camera, video
        self._channel = CompressedImageChannel(f"/{entity(camera)}", context=context)

    def log(self, frame_index: int, time: int) -> None:
        picture = messages.CompressedImage(
            timestamp=_timestamp(time),
            frame_id=self._camera,
            data=self._video.pictures[frame_index].data,
            format=PNG,
        )
        self._channel.log(picture, log_time=time)


class _CurveTopic:
    def __init__(self, context: foxglove.Context, curve: Curve) -> None:
        self._curve = curve
        schema = {
            "title": curve.feature,
            "type": "object",
            "properties": {label: {"type": "number"} for label in curve.labels},
        }
        self._channel = foxglove.Channel(f"/{entity(curve.feature)}", schema=schema, context=context)

    def log(self, frame_index: int, time: int) -> None:
        values = self._curve.values[frame_index].tolist()
        self._channel.log(dict(zip(self._curve.labels, values, strict=True)), log_time=time)


class _PlannerTopic:
    """What was said on each frame; after the last, how the attempt ended."""

    def __init__(self, context: foxglove.Context, episode: Episode) -> None:
        self._channel = LogChannel("/planner", context=context)
        self._lines: dict[int, list[tuple[str, str, messages.LogLevel]]] = {}
        for words in episode.words:
            self._add(words.frame_index, words.style or words.role, words.content, messages.LogLevel.Info)
        if outcome := ending(episode):
            level = messages.LogLevel.Info if outcome == "done" else messages.LogLevel.Warning
            self._add(episode.entry.num_frames - 1, "outcome", outcome, level)

    def _add(self, frame_index: int, name: str, text: str, level: messages.LogLevel) -> None:
        self._lines.setdefault(frame_index, []).append((name, text, level))

    def log(self, frame_index: int, time: int) -> None:
        for name, text, level in self._lines.get(frame_index, []):
            line = messages.Log(timestamp=_timestamp(time), level=level, message=text, name=name)
            self._channel.log(line, log_time=time)


def _timestamp(time: int) -> messages.Timestamp:
    return messages.Timestamp(sec=time // 10**9, nsec=time % 10**9)
