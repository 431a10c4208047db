"""An episode as a Rerun recording (.rrd): videos by stream copy, curves and words on one time axis.

Timelines: `time` (seconds in the episode) and `frame`. Entities: a feature's name with slashes, for
example observation/images/image; `planner`, what was said and how the attempt ended; `facts`. A camera
whose video cannot be copied has PNGs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import rerun as rr
import rerun.blueprint as rrb

from dayshift.dataset_export.looking.dataset import Curve, Dataset, Episode
from dayshift.dataset_export.looking.encoded import PNG, EncodedPart, read_encoded_pictures
from dayshift.dataset_export.looking.viewer_files import ending, entity, new_file, not_copied, time_ns

_CODECS = {"h264": rr.VideoCodec.H264, "hevc": rr.VideoCodec.H265, "av1": rr.VideoCodec.AV1}


def write_rrd(dataset: Dataset, episode_index: int, to: Path) -> list[str]:
    """Write an episode; says of which cameras the pictures could not be copied.

    Raises DayshiftError when the episode cannot be read or `to` not be written.
    """
    episode = dataset.episode(episode_index)
    videos = {
        camera: read_encoded_pictures(dataset.video(camera, episode_index)) for camera in dataset.cameras
    }
    name = f"{dataset.root.resolve().name}, episode {episode_index}"
    with new_file(to) as part, rr.RecordingStream("dayshift", recording_id=name) as recording:
        recording.save(part, default_blueprint=_blueprint(episode, videos))
        recording.send_recording_name(name)
        _send_facts(recording, episode)
        for camera, video in videos.items():
            _send_video(recording, camera, video, episode.fps)
        for curve in episode.curves:
            _send_curve(recording, curve, episode.fps)
        _send_words(recording, episode)
        recording.disconnect()
    return not_copied(videos)


def _times(frames: Iterable[int], fps: int) -> list[rr.TimeColumn]:
    frames = list(frames)
    times = np.array([time_ns(frame, fps) for frame in frames], "timedelta64[ns]")
    return [rr.TimeColumn("time", duration=times), rr.TimeColumn("frame", sequence=frames)]


def _send_facts(recording: rr.RecordingStream, episode: Episode) -> None:
    entry = episode.entry
    facts = {"task": entry.task, "frames": entry.num_frames, "fps": episode.fps} | dict(entry.facts)
    rows = [f"| {name} | {str(value).replace('|', '\\|')} |" for name, value in facts.items()]
    table = "\n".join(["| | |", "|---|---|", *rows])
    document = rr.TextDocument(table, media_type=rr.MediaType.MARKDOWN)
    recording.log("facts", document, static=True)


def _send_video(recording: rr.RecordingStream, camera: str, video: EncodedPart, fps: int) -> None:
    data = [picture.data for picture in video.pictures]
    times = _times((picture.frame_index for picture in video.pictures), fps)
    if video.codec == PNG:
        images = rr.EncodedImage.columns(blob=data, media_type=["image/png"] * len(data))
        recording.send_columns(entity(camera), times, images)
        return
    recording.log(entity(camera), rr.VideoStream(codec=_CODECS[video.codec]), static=True)
    keys = [picture.is_keyframe for picture in video.pictures]
    recording.send_columns(entity(camera), times, rr.VideoStream.columns(sample=data, is_keyframe=keys))


def _send_curve(recording: rr.RecordingStream, curve: Curve, fps: int) -> None:
    num_frames, size = curve.values.shape
    recording.log(entity(curve.feature), rr.SeriesLines(names=list(curve.labels)), static=True)
    recording.send_columns(
        entity(curve.feature),
        _times(range(num_frames), fps),
        rr.Scalars.columns(scalars=curve.values.ravel()).partition([size] * num_frames),
    )


def _send_words(recording: rr.RecordingStream, episode: Episode) -> None:
    """On one entity: the viewer keeps the order of what was said at the same time only there."""
    for words in episode.words:
        _set_time(recording, words.frame_index, episode.fps)
        recording.log("planner", rr.TextLog(f"{words.style or words.role}: {words.content}", level="INFO"))
    if outcome := ending(episode):
        _set_time(recording, episode.entry.num_frames - 1, episode.fps)
        level = "INFO" if outcome == "done" else "WARN"
        recording.log("planner", rr.TextLog(f"outcome: {outcome}", level=level))


def _set_time(recording: rr.RecordingStream, frame_index: int, fps: int) -> None:
    recording.set_time("time", duration=np.timedelta64(time_ns(frame_index, fps), "ns"))
    recording.set_time("frame", sequence=frame_index)


def _blueprint(episode: Episode, cameras: Iterable[str]) -> rrb.Blueprint:
    """Cameras above, curves below them (single numbers together), words and facts beside."""
    views = [rrb.Spatial2DView(origin=entity(camera), name=camera) for camera in cameras]
    many = [curve.feature for curve in episode.curves if len(curve.labels) > 1]
    single = [curve.feature for curve in episode.curves if len(curve.labels) == 1]
    plots = [rrb.TimeSeriesView(origin=entity(feature), name=feature) for feature in many]
    if single:
        plots.append(rrb.TimeSeriesView(contents=[entity(feature) for feature in single], name="frame"))
    rows = [rrb.Horizontal(*views)] if views else []
    shares = [3] * len(rows) + [2] * len(many) + [1] * bool(single)
    stage = rrb.Vertical(*rows, *plots, row_shares=shares)
    words = rrb.TextLogView(origin="planner", name="planner")
    facts = rrb.TextDocumentView(origin="facts", name="facts")
    return rrb.Blueprint(
        rrb.Horizontal(stage, rrb.Vertical(words, facts), column_shares=[3, 2]),
        rrb.TimePanel(timeline="time", state="collapsed"),
        collapse_panels=True,
    )
