from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.dataset_export.video import AV1, H264, Codec, VideoReader, VideoWriter


def picture(index: int, size: int = 32) -> np.ndarray:
    """A grey level that says which picture it is, as far as a lossy codec lets it."""
    return np.full((size, size, 3), 20 + (index * 13) % 200, np.uint8)


def write(path: Path, indices: list[int], codec: Codec = H264, fps: int = 20) -> None:
    with VideoWriter(path, width=32, height=32, fps=fps, codec=codec) as video:
        for index in indices:
            video.write(picture(index), index)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    indices=st.sets(st.integers(0, 400), min_size=1, max_size=40).map(sorted),
    fps=st.sampled_from([10, 20, 24, 30, 60]),
)
def test_every_picture_keeps_its_control_step(tmp_path: Path, indices: list[int], fps: int) -> None:
    path = tmp_path / "v.mp4"
    write(path, indices, fps=fps)
    with VideoReader(path, fps=fps) as video:
        assert video.frame_indices == indices
        shown = dict(video.frames())
        assert list(shown) == indices
        for index in indices:
            assert np.abs(shown[index].astype(int) - picture(index)).max() <= 4
            assert np.array_equal(video.frame(index), shown[index])


@pytest.mark.parametrize("codec", [H264, AV1], ids=lambda codec: codec.name)
def test_count_is_exact_and_order_kept_by_each_codec(tmp_path: Path, codec: Codec) -> None:
    path = tmp_path / "v.mp4"
    with VideoWriter(path, width=64, height=64, fps=20, codec=codec) as video:
        for index in range(95):
            video.write(picture(index, 64), index)
    with VideoReader(path, fps=20) as video:
        levels = [image.mean() for _, image in video.frames()]
        assert video.frame_indices == list(range(95))
    assert np.abs(np.array(levels) - [picture(i).mean() for i in range(95)]).max() <= 4


@pytest.mark.parametrize("codec", [H264, AV1], ids=lambda codec: codec.name)
def test_an_encoder_takes_no_priority_over_other_processes(tmp_path: Path, codec: Codec) -> None:
    with VideoWriter(tmp_path / "video.mp4", width=64, height=64, fps=20, codec=codec) as writer:
        writer.write(np.zeros((64, 64, 3), np.uint8), 0)
        threads = [int(thread_id) for thread_id in os.listdir("/proc/self/task")]
        assert {os.sched_getscheduler(thread_id) for thread_id in threads} == {os.SCHED_OTHER}


def test_a_control_step_without_a_picture_is_a_key_error(tmp_path: Path) -> None:
    write(tmp_path / "v.mp4", [0, 5, 10])
    with VideoReader(tmp_path / "v.mp4", fps=20) as video:
        for absent in (3, 11):
            with pytest.raises(KeyError, match=f"no control step {absent}"):
                video.frame(absent)
        assert video.frame(10).mean() == pytest.approx(picture(10).mean(), abs=4)


def test_a_picture_of_another_size_or_out_of_order_is_refused(tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "v.mp4", width=32, height=32, fps=20) as video:
        video.write(picture(4), 4)
        with pytest.raises(ValueError, match="picture 4 after picture 4"):
            video.write(picture(4), 4)
        with pytest.raises(ValueError, match="expected uint8"):
            video.write(picture(5, 64), 5)
        assert video.num_frames == 1
