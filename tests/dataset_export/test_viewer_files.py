"""Files for Rerun and Foxglove, read back with those projects' own readers."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pyarrow as pa
import pytest
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from mcap.reader import make_reader
from mcap_protobuf.decoder import DecoderFactory
from recording_samples import STORY, make_run
from rerun import VideoCodec
from rerun.experimental import RrdReader

from dayshift.dataset_export.export import ExportOptions, export_dataset
from dayshift.dataset_export.looking.dataset import Dataset, Episode
from dayshift.dataset_export.looking.mcap_file import write_mcap
from dayshift.dataset_export.looking.rerun_file import write_rrd
from dayshift.dataset_export.looking.viewer_files import require
from dayshift.dataset_export.video import VideoReader
from dayshift.experiments.cli import run as run_command
from dayshift.types import DayshiftError

EPISODE = 1  # the second attempt, after which the step is given up
FPS = 20


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("viewers")
    export_dataset([make_run(folder / "run-1")], folder / "ds", ExportOptions())
    return Dataset(folder / "ds")


@pytest.fixture(scope="module")
def episode(dataset: Dataset) -> Episode:
    return dataset.episode(EPISODE)


def recorded_digests(dataset: Dataset, camera: str) -> list[str]:
    part = dataset.video(camera, EPISODE)
    with VideoReader(part.path, fps=FPS) as video:
        return [video.digest(part.first + index) for index in range(part.num_frames)]


def decoded_digests(samples: list[bytes]) -> list[str]:
    decoder = av.CodecContext.create("h264", "r")
    assert isinstance(decoder, VideoCodecContext)
    decoder.thread_count = 1
    frames = [frame for sample in samples for frame in decoder.decode(Packet(sample))]
    frames += decoder.decode(None)
    return [hashlib.sha256(frame.to_ndarray().tobytes()).hexdigest()[:32] for frame in frames]


def expected_words(episode: Episode) -> list[tuple[int, str, str]]:
    said = [(words.frame_index, words.style or words.role, words.content) for words in episode.words]
    last = episode.entry.num_frames - 1
    return [*said, (last, "outcome", "failed; the step was given up (attempts)")]


# --- Rerun -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recording:
    """A recording's temporal rows and static values, by entity."""

    name: str
    rows: dict[str, list[dict[str, Any]]]
    static: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def recording(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("rrd") / "episode.rrd"
    write_rrd(dataset, EPISODE, path)
    reader = RrdReader(path)
    (entry,) = reader.recordings()
    assert len(reader.blueprints()) == 1
    rows: dict[str, list[dict[str, Any]]] = {}
    static: dict[str, dict[str, Any]] = {}
    for chunk in reader.stream().to_chunks():
        batch = chunk.to_record_batch()
        times = batch.schema.get_field_index("time")
        if times >= 0:
            batch = batch.set_column(times, "time", batch.column(times).cast(pa.int64()))
        if chunk.is_static:
            static.setdefault(chunk.entity_path, {}).update(batch.to_pylist()[0])
        else:
            rows.setdefault(chunk.entity_path, []).extend(batch.to_pylist())
    for of_entity in rows.values():
        of_entity.sort(key=lambda row: row["frame"])
    return Recording(entry.recording_id, rows, static)


def test_rerun_has_the_pictures_as_they_were_encoded(dataset: Dataset, recording: Recording) -> None:
    for camera in dataset.cameras:
        entity = "/" + camera.replace(".", "/")
        assert recording.static[entity]["VideoStream:codec"] == [VideoCodec.H264.value]
        rows = recording.rows[entity]
        samples = [bytes(row["VideoStream:sample"][0]) for row in rows]
        assert decoded_digests(samples) == recorded_digests(dataset, camera)
        assert [row["VideoStream:is_keyframe"] for row in rows] == [[n % 2 == 0] for n in range(len(rows))]
        assert [row["frame"] for row in rows] == list(range(STORY[EPISODE].num_frames))
        assert [row["time"] for row in rows] == [n * 50_000_000 for n in range(len(rows))]


def test_rerun_has_the_curves(episode: Episode, recording: Recording) -> None:
    for curve in episode.curves:
        entity = "/" + curve.feature.replace(".", "/")
        assert recording.static[entity]["SeriesLines:names"] == list(curve.labels)
        rows = recording.rows[entity]
        assert [row["Scalars:scalars"] for row in rows] == curve.values.tolist()
        assert [row["time"] for row in rows] == [n * 50_000_000 for n in range(len(rows))]


def test_rerun_has_the_words_in_order(episode: Episode, recording: Recording) -> None:
    rows = sorted(recording.rows["/planner"], key=lambda row: (row["frame"], row["rerun.controls.RowId"]))
    found = [(row["frame"], row["TextLog:text"][0]) for row in rows]
    assert found == [(frame, f"{name}: {text}") for frame, name, text in expected_words(episode)]
    assert [row["TextLog:level"][0] for row in rows] == ["INFO"] * (len(rows) - 1) + ["WARN"]
    facts = recording.static["/facts"]["TextDocument:text"][0]
    assert "| give_up_reason | attempts |" in facts
    assert recording.name == "ds, episode 1"


# --- Foxglove ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class McapFile:
    """Messages as (log time, decoded message), schemas, and metadata."""

    messages: dict[str, list[tuple[int, Any]]]
    schemas: dict[str, tuple[str, str]]  # topic -> (schema, encoding)
    attempt: dict[str, str]


@pytest.fixture(scope="module")
def mcap_file(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> McapFile:
    path = tmp_path_factory.mktemp("mcap") / "episode.mcap"
    write_mcap(dataset, EPISODE, path)
    messages: dict[str, list[tuple[int, Any]]] = {}
    schemas: dict[str, tuple[str, str]] = {}
    protobuf = DecoderFactory()
    with path.open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        for schema, channel, message in reader.iter_messages():
            assert schema is not None
            decode = protobuf.decoder_for(channel.message_encoding, schema) or json.loads
            messages.setdefault(channel.topic, []).append((message.log_time, decode(message.data)))
            schemas[channel.topic] = (schema.name, schema.encoding)
        (record,) = reader.iter_metadata()
    assert record.name == "attempt"
    return McapFile(messages, schemas, record.metadata)


def test_foxglove_has_the_pictures_as_they_were_encoded(dataset: Dataset, mcap_file: McapFile) -> None:
    for camera in dataset.cameras:
        topic = "/" + camera.replace(".", "/")
        assert mcap_file.schemas[topic] == ("foxglove.CompressedVideo", "protobuf")
        times = [time for time, _ in mcap_file.messages[topic]]
        assert times == [n * 50_000_000 for n in range(STORY[EPISODE].num_frames)]
        pictures = [picture for _, picture in mcap_file.messages[topic]]
        assert [picture.timestamp.seconds * 10**9 + picture.timestamp.nanos for picture in pictures] == times
        assert {(picture.format, picture.frame_id) for picture in pictures} == {("h264", camera)}
        assert decoded_digests([picture.data for picture in pictures]) == recorded_digests(dataset, camera)


def test_foxglove_has_the_curves(episode: Episode, mcap_file: McapFile) -> None:
    for curve in episode.curves:
        topic = "/" + curve.feature.replace(".", "/")
        assert mcap_file.schemas[topic] == (curve.feature, "jsonschema")
        assert mcap_file.messages[topic] == [
            (n * 50_000_000, dict(zip(curve.labels, row, strict=True)))
            for n, row in enumerate(curve.values.tolist())
        ]


def test_foxglove_has_the_words_in_order(episode: Episode, mcap_file: McapFile) -> None:
    assert mcap_file.schemas["/planner"] == ("foxglove.Log", "protobuf")
    found = [(time // 50_000_000, log.name, log.message) for time, log in mcap_file.messages["/planner"]]
    assert found == expected_words(episode)
    assert mcap_file.attempt["attempt_id"] == STORY[EPISODE].attempt_id
    assert mcap_file.attempt["give_up_reason"] == "attempts"


# --- pictures that cannot be copied ----------------------------------------------------------------------


def test_pictures_of_a_video_with_b_frames_are_written_as_png(dataset: Dataset, tmp_path: Path) -> None:
    """As lerobot's editing tools leave it: they encode anew, with B-frames."""
    copy = shutil.copytree(dataset.root, tmp_path / "ds")
    camera = "observation.images.image"
    video = copy / f"videos/{camera}/chunk-000/file-000.mp4"
    with VideoReader(video, fps=FPS) as reader, av.open(str(tmp_path / "new.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"bf": "2", "b-adapt": "0"})
        stream.width = stream.height = 64
        for _, image in reader.frames():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))
    (tmp_path / "new.mp4").replace(video)
    edited = Dataset(copy)
    part = edited.video(camera, EPISODE)
    with VideoReader(part.path, fps=FPS) as reader:
        expected = [reader.frame(part.first + index) for index in range(part.num_frames)]

    note = f"{camera}: the video has B-frames, so each picture was written as PNG, without loss"
    assert write_rrd(edited, EPISODE, tmp_path / "a.rrd") == [note]
    assert write_mcap(edited, EPISODE, tmp_path / "a.mcap") == [note]
    rows = [
        row
        for chunk in RrdReader(tmp_path / "a.rrd").stream().to_chunks()
        if chunk.entity_path == "/observation/images/image"
        for row in chunk.to_record_batch().to_pylist()
    ]
    assert {row["EncodedImage:media_type"][0] for row in rows} == {"image/png"}
    with (tmp_path / "a.mcap").open("rb") as file:
        pictures = [
            decoded.decoded_message
            for decoded in make_reader(file, decoder_factories=[DecoderFactory()]).iter_decoded_messages(
                topics=["/observation/images/image"]
            )
        ]
    assert [picture.format for picture in pictures] == ["png"] * len(expected)
    for found in ([bytes(row["EncodedImage:blob"][0]) for row in rows], [one.data for one in pictures]):
        images = [cv2.imdecode(np.frombuffer(png, np.uint8), cv2.IMREAD_COLOR) for png in found]
        assert all(image is not None for image in images)
        assert np.array_equal(np.stack(images)[..., ::-1], expected)  # type: ignore[arg-type]


# --- the command -------------------------------------------------------------------------------------


@pytest.fixture
def show(dataset: Dataset, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_command(["show", str(dataset.root), *map(str, arguments)])
        out, err = capfd.readouterr()
        return code, out, err

    return run


def test_the_command_writes_both_files(
    show: Callable[..., tuple[int, str, str]], dataset: Dataset, tmp_path: Path
) -> None:
    rrd, mcap = tmp_path / "a.rrd", tmp_path / "a.mcap"
    code, out, _ = show("--episode", 3, "--rrd", rrd, "--mcap", mcap, "--json")
    assert code == 0
    assert json.loads(out) == {
        "dataset": str(dataset.root),
        "episode": 3,
        "rrd": str(rrd),
        "mcap": str(mcap),
        "notes": [],
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mcap", "a.rrd"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rrd", "there.rrd"], "there.rrd exists already: choose another name"),
        (["--mcap", "there.rrd"], "there.rrd exists already: choose another name"),
        (["--rrd", "none/new.rrd"], "cannot write none/new.rrd: No such file or directory"),
        (["--rrd", "new.rrd", "--episode", "5"], "no episode 5, allowed: 0 to 4"),
        (["--episode", "7"], "no episode 7, allowed: 0 to 4"),
        (["--host", "0.0.0.0"], "listening on 0.0.0.0 needs a key"),
    ],
)
def test_a_mistake_is_one_line(
    show: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.rrd").write_bytes(b"mine")
    code, out, err = show(*arguments)
    assert code != 0
    assert out == ""
    assert expected in err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["there.rrd"]
    assert (tmp_path / "there.rrd").read_bytes() == b"mine"


def test_a_viewer_that_is_not_installed_is_named() -> None:
    with pytest.raises(DayshiftError, match=r"--rrd needs rerun-sdk.*: pip install 'dayshift\[show\]'"):
        require("a_viewer_that_is_not_there", "rerun-sdk", "--rrd")
