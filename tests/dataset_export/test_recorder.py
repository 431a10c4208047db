from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recording_samples import make_frames, make_spec, make_start

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.durable import only_writer
from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.recorder import Recorder
from dayshift.dataset_export.video import VideoReader


def test_an_attempt_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    frames, spec, start = make_frames(150, images_every=5), make_spec(), make_start()
    recorder.on_start("a", spec, start)
    for frame in frames:
        recorder.on_frame("a", 0.05 * frame.index, frame)
    recording = recorder.on_end("a")

    folder = tmp_path / "attempts" / "a"
    table = files.read_frames(folder / files.FRAMES)
    assert len(table) == recording.num_frames == 150
    assert np.array_equal(table.sim_state, [frame.sim_state for frame in frames])
    assert np.array_equal(table.robot_state, [frame.robot_state for frame in frames])
    assert np.array_equal(table.action, [frame.action for frame in frames])
    assert table.success.tolist() == [False] * 149 + [True]
    assert table.reward[-1] == 1.0
    assert table.t[10] == 0.5
    read = files.read_start(folder / files.START)
    assert read.spec == spec
    assert np.array_equal(read.start.sim_state, start.sim_state)
    assert read.start.fixture_poses == start.fixture_poses
    assert recording.num_images == {"agentview": 30, "wrist": 30}
    with VideoReader(folder / "wrist.mp4", fps=20) as video:
        assert video.frame_indices == list(range(0, 150, 5))
    assert recording.num_bytes == sum(path.stat().st_size for path in folder.iterdir())


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lengths=st.lists(st.integers(0, 140), min_size=1, max_size=4), order=st.randoms())
def test_interleaved_attempts_do_not_mix(tmp_path_factory, lengths: list[int], order) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    recorder = Recorder(run_dir)
    attempts = {f"r{i}": make_frames(n, images_every=50, seed=i) for i, n in enumerate(lengths)}
    for i, name in enumerate(attempts):
        recorder.on_start(name, make_spec(), make_start(i))
    turns = [name for name, frames in attempts.items() for _ in frames]
    order.shuffle(turns)
    waiting = {name: iter(frames) for name, frames in attempts.items()}
    for name in turns:
        recorder.on_frame(name, 0.0, next(waiting[name]))
    for name, frames in attempts.items():
        assert recorder.on_end(name).num_frames == len(frames)
        folder = run_dir / "attempts" / name
        assert folder.exists() == bool(frames)  # an attempt without a frame leaves nothing
        if frames:
            table = files.read_frames(folder / files.FRAMES)
            assert np.array_equal(table.action, [frame.action for frame in frames])


def test_a_folder_has_its_final_name_only_when_it_is_whole(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.on_start("a", make_spec(), make_start())
    for frame in make_frames(70):
        recorder.on_frame("a", 0.0, frame)
        assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["a.part"]
    recorder.on_end("a")
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["a"]


def test_a_missing_frame_is_an_error_and_never_a_gap(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.on_start("a", make_spec(), make_start())
    frames = make_frames(3)
    recorder.on_frame("a", 0.0, frames[0])
    with pytest.raises(RecordingError, match="frame 2 came where frame 1 was due"):
        recorder.on_frame("a", 0.1, frames[2])


def test_an_aborted_attempt_leaves_nothing_and_its_id_is_free(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for _ in range(2):
        recorder.on_start("a", make_spec(), make_start())
        for frame in make_frames(70):
            recorder.on_frame("a", 0.0, frame)
        recorder.on_abort("a")
        assert list((tmp_path / "attempts").iterdir()) == []


def test_an_attempt_is_never_recorded_over(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.on_start("a", make_spec(), make_start())
    recorder.on_frame("a", 0.0, make_frames(1)[0])
    recorder.on_end("a")
    with pytest.raises(RecordingError, match="already recorded"):
        recorder.on_start("a", make_spec(), make_start())


@pytest.mark.parametrize("attempt_id", ["../x", "", "a/b", ".hidden", "a.part", "a b"])
def test_an_id_that_is_no_safe_file_name_is_refused(tmp_path: Path, attempt_id: str) -> None:
    with pytest.raises(ValueError, match="attempt id"):
        Recorder(tmp_path).on_start(attempt_id, make_spec(), make_start())


def test_two_recorders_never_write_one_folder(tmp_path: Path) -> None:
    with (
        Recorder(tmp_path),
        pytest.raises(RecordingError, match="another process is still writing here"),
        only_writer(tmp_path, patience_s=0.1),
    ):
        raise AssertionError
    Recorder(tmp_path).close()
