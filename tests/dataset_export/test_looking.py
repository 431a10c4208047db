"""What `dayshift show` gives of a dataset is what was recorded: rows, words, and pictures by hash."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import av
import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream
from recording_samples import STORY, PaintedRenderer, Try, make_frames, make_run

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.dataset_draft import FileSizes
from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.looking.dataset import Dataset, VideoPart
from dayshift.dataset_export.looking.encoded import EncodedPart, read_encoded_pictures
from dayshift.dataset_export.looking.pictures import DatasetPictures
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.video import AV1, H264, Codec, VideoReader
from dayshift.types import DayshiftError


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "run-1")


@pytest.fixture(scope="module")
def root(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as a dataset whose episodes lie in several files."""
    root = tmp_path_factory.mktemp("looking") / "ds"
    sizes = FileSizes(data_file_mb=0.01, video_file_mb=0.005)
    export_dataset([run_dir], root, ExportOptions(sizes=sizes))
    assert len(list(root.glob("videos/*/*/*.mp4"))) > 2
    return root


@pytest.fixture(scope="module")
def dataset(root: Path) -> Dataset:
    return Dataset(root)


def test_rows_are_those_that_were_recorded(dataset: Dataset) -> None:
    for number, one in enumerate(STORY):
        episode = dataset.episode(number)
        frames = make_frames(one.num_frames, images_every=0, seed=number)
        curves = {curve.feature: curve for curve in episode.curves}
        assert list(curves) == ["observation.state", "action", "next.reward", "next.success", "next.done"]
        assert np.array_equal(curves["observation.state"].values, [frame.robot_state for frame in frames])
        assert np.array_equal(curves["action"].values, [frame.action for frame in frames])
        assert curves["next.success"].values.ravel().tolist() == [frame.success for frame in frames]
        assert curves["action"].labels[-1] == "gripper"
        assert curves["next.done"].labels == ("done",)
        assert episode.identity == ("run-1", one.attempt_id)
        assert episode.recorded_at is not None
        assert episode.recorded_at[0] == 10.0 * number
        assert (episode.entry.task, episode.entry.num_frames) == (one.task, one.num_frames)
        assert (episode.entry.facts["outcome"], episode.entry.facts["attempt"]) == (one.outcome, one.number)


def test_words_are_on_the_frames_that_they_were_said_on(dataset: Dataset) -> None:
    words = dataset.episode(1).words
    in_force = {one.style: (one.frame_index, one.content) for one in words if one.style}
    assert in_force["subtask"] == (0, STORY[1].task)
    assert in_force["memory"] == (0, "Failed attempts before this one: 1.")
    said = [(one.frame_index, one.role, one.content) for one in words if not one.style]
    assert said[0] == (0, "user", "Result: failed, attempt 1 of 2.")
    assert [(frame, role) for frame, role, _ in said[-2:]] == [(8, "user"), (8, "assistant")]
    assert json.loads(said[-1][2])["action"] == "give_up"


def test_every_picture_is_the_one_that_was_recorded(run_dir: Path, dataset: Dataset) -> None:
    with open_run(run_dir) as run, DatasetPictures(dataset) as pictures:
        for number, recorded in enumerate(run.recorded_attempts()):
            for camera, key in v3.VIDEO_KEYS.items():
                with recorded.video(camera) as video:
                    for index, picture in video.frames():
                        assert np.array_equal(pictures.picture(key, number, index), picture)
                assert pictures.is_as_recorded(key, number) is True


def test_swapped_pictures_are_noticed(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "ds")
    one, other = (copy / f"videos/{key}/chunk-000/file-000.mp4" for key in v3.VIDEO_KEYS.values())
    shutil.copy(one, other)
    with DatasetPictures(Dataset(copy)) as pictures:
        assert pictures.is_as_recorded("observation.images.image", 0) is True
        assert pictures.is_as_recorded("observation.images.image2", 0) is False


def decoded(part: EncodedPart, first: int = 0) -> Iterator[str]:
    """Hashes of the pictures, decoded from a stream that starts at picture `first`, a key frame."""
    decoder = av.CodecContext.create({"av1": "libdav1d"}.get(part.codec, part.codec), "r")
    assert isinstance(decoder, VideoCodecContext)
    decoder.thread_count = 1
    packets = [Packet(picture.data) for picture in part.pictures[first:]]
    for packet in [*packets, None]:
        for frame in decoder.decode(packet):
            yield hashlib.sha256(frame.to_ndarray().tobytes()).hexdigest()[:32]


@pytest.mark.parametrize("codec", [H264, AV1], ids=lambda codec: codec.name)
def test_a_stream_of_encoded_pictures_shows_the_same(run_dir: Path, tmp_path: Path, codec: Codec) -> None:
    export_dataset([run_dir], tmp_path / "ds", ExportOptions(codec=codec), make_renderer=PaintedRenderer)
    dataset = Dataset(tmp_path / "ds")
    for camera in dataset.cameras:
        for number, one in enumerate(STORY):
            part = dataset.video(camera, number)
            with VideoReader(part.path, fps=part.fps) as video:
                expected = [video.digest(part.first + index) for index in range(part.num_frames)]
            encoded = read_encoded_pictures(part)
            assert encoded.codec == codec.name
            assert [picture.frame_index for picture in encoded.pictures] == list(range(one.num_frames))
            keys = [picture.frame_index for picture in encoded.pictures if picture.is_keyframe]
            assert keys == list(range(0, one.num_frames, codec.gop_size))
            for first in (0, keys[-1]):
                assert list(decoded(encoded, first)) == expected[first:]


def write_video(path: Path, codec: str, **options: str) -> None:
    """32 pictures in shades that rise."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=20, options=options)
        assert isinstance(stream, VideoStream)
        stream.width = stream.height = 64
        for index in range(32):
            image = np.full((64, 64, 3), 7 * index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


@pytest.mark.parametrize(
    ("codec", "options", "why"),
    [
        ("libx264", {"bf": "2", "b-adapt": "0"}, "the video has B-frames"),
        ("libx264", {"bf": "0", "g": "30"}, "the episode does not start with a key frame"),
        ("libvpx-vp9", {"lag-in-frames": "0"}, "the codec is vp9"),
    ],
)
def test_pictures_that_cannot_be_copied_are_png_without_loss(
    tmp_path: Path, codec: str, options: dict[str, str], why: str
) -> None:
    write_video(tmp_path / "video.mp4", codec, **options)
    part = VideoPart(path=tmp_path / "video.mp4", first=20, num_frames=12, fps=20)
    encoded = read_encoded_pictures(part)
    assert (encoded.codec, encoded.why_png) == ("png", why)
    with VideoReader(part.path, fps=20) as video:
        for picture in encoded.pictures:
            decoded = cv2.imdecode(np.frombuffer(picture.data, np.uint8), cv2.IMREAD_COLOR)
            assert decoded is not None
            assert np.array_equal(decoded[..., ::-1], video.frame(20 + picture.frame_index))
    assert len(encoded.pictures) == 12


def test_a_picture_that_is_missing_is_named(tmp_path: Path, root: Path) -> None:
    shard = root / "videos/observation.images.image/chunk-000/file-000.mp4"
    with pytest.raises(DayshiftError, match=r"picture \d+ is missing"):
        read_encoded_pictures(VideoPart(path=shard, first=0, num_frames=1000, fps=20))
    write_video(tmp_path / "b-frames.mp4", "libx264", bf="2")
    with pytest.raises(DayshiftError, match="picture 32 is missing"):
        read_encoded_pictures(VideoPart(path=tmp_path / "b-frames.mp4", first=30, num_frames=5, fps=20))


def test_a_dataset_without_our_columns_can_be_looked_at(root: Path, tmp_path: Path) -> None:
    """As lerobot's own tools write it: no facts, no words; names of dimensions in a mapping, or none."""
    copy = shutil.copytree(root, tmp_path / "ds")
    (copy / v3.ATTEMPTS).unlink()
    info = json.loads((copy / v3.INFO).read_text())
    for name in (v3.PERSISTENT, v3.EVENTS, "attempt_id", "recorded_at"):
        del info["features"][name]
    info["features"]["action"]["names"] = {"motors": [f"motor {number}" for number in range(7)]}
    info["features"]["observation.state"]["names"] = None
    (copy / v3.INFO).write_text(json.dumps(info))
    for path in copy.glob("data/*/*.parquet"):
        table = pq.read_table(path)
        pq.write_table(table.select([name for name in table.column_names if name in info["features"]]), path)
    dataset = Dataset(copy)
    episode = dataset.episode(2)
    assert (episode.words, episode.identity, episode.recorded_at) == ((), None, None)
    assert episode.entry.facts == {}
    assert episode.entry.task == STORY[2].task
    labels = {curve.feature: curve.labels for curve in episode.curves}
    assert labels["action"][6] == "motor 6"
    assert labels["observation.state"][0] == "state0"
    with DatasetPictures(dataset) as pictures:
        assert pictures.picture("observation.images.image", 2, 6).shape == (64, 64, 3)
        assert pictures.is_as_recorded("observation.images.image", 2) is None


def test_mistakes_and_damage_are_told_in_one_line(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root, tmp_path / "ds")
    dataset = Dataset(copy)
    with DatasetPictures(dataset) as pictures:
        with pytest.raises(DayshiftError, match="no episode 5, allowed: 0 to 4"):
            dataset.episode(5)
        with pytest.raises(DayshiftError, match="no camera front, allowed: observation"):
            pictures.picture("front", 0, 0)
        with pytest.raises(DayshiftError, match="episode 2: no frame 7, allowed: 0 to 6"):
            pictures.picture("observation.images.image", 2, 7)
        video = dataset.video("observation.images.image", 0).path
        video.write_bytes(video.read_bytes()[:500])
        with pytest.raises(DayshiftError, match=r"file-000\.mp4: "):
            pictures.picture("observation.images.image", 0, 0)
        assert pictures.is_as_recorded("observation.images.image", 0) is False
        with pytest.raises(DayshiftError, match=r"file-000\.mp4: "):
            read_encoded_pictures(dataset.video("observation.images.image", 0))
    (copy / "data/chunk-000/file-000.parquet").write_bytes(b"PAR1")
    with pytest.raises(DayshiftError, match=r"file-000\.parquet: Parquet"):
        dataset.episode(0)


def test_videos_are_closed_when_there_are_many(tmp_path: Path) -> None:
    """More shards than are kept open: all can be looked at, in any order."""
    tries = [Try(key=(1, 1, number + 1), num_frames=2) for number in range(20)]
    export_dataset(
        [make_run(tmp_path / "run-1", tries)],
        tmp_path / "ds",
        ExportOptions(sizes=FileSizes(video_file_mb=1e-4)),
    )
    dataset = Dataset(tmp_path / "ds")
    assert len(list(tmp_path.glob("ds/videos/*/*/*.mp4"))) == 40
    with DatasetPictures(dataset) as pictures:
        for number in (*range(20), *reversed(range(20))):
            assert all(pictures.is_as_recorded(camera, number) for camera in dataset.cameras)
