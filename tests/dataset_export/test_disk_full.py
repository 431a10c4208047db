"""A disk that is really full: a small tmpfs. Mounting needs root, as CI and containers have."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from recording_samples import attempt_row, make_frames, make_spec, make_start, recording_row, run_row

from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.recorder import Recording
from dayshift.dataset_export.run_folder import open_run
from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.tables import AttemptRow, EventRow
from dayshift.dataset_export.writer_process import RecorderProcess
from dayshift.sim.types import Frame

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def with_noise(frames: list[Frame], *, in_images: bool) -> Iterator[Frame]:
    """Frames that do not compress: the disk fills by video, or by states alone."""
    rng = np.random.default_rng(0)
    for frame in frames:
        image = rng.integers(0, 256, (128, 128, 3), dtype=np.uint8)
        yield Frame(
            index=frame.index,
            sim_state=rng.normal(size=79 if in_images else 8000),
            robot_state=frame.robot_state,
            action=frame.action,
            reward=0.0,
            success=False,
            images={"agentview": image} if in_images else {},
        )


def record(recorder: RecorderProcess, attempt_id: str, frames: Iterable[Frame]) -> Recording:
    with recorder.attempt(attempt_id) as attempt:
        attempt.on_start(make_spec(), make_start())
        for frame in frames:
            attempt.on_frame(frame)
        return attempt.finish()


def fill(store: RunStore) -> None:
    for i in range(10_000):
        store.save(EventRow(run_id="run-1", t=float(i), robot="r", kind="log", body={"text": "x" * 10_000}))


@pytest.mark.parametrize("in_images", [True, False], ids=["video", "states"])
def test_a_full_disk_is_one_line_and_earlier_attempts_are_whole(small_disk: Path, in_images: bool) -> None:
    run_dir = small_disk / "run-1"
    run_dir.mkdir()
    with (
        RunStore(database_url(run_dir), "run-1") as store,
        RecorderProcess(run_dir, now=time.monotonic) as recorder,
    ):
        store.save(run_row("run-1"))
        store.save(recording_row("run-1", record(recorder, "small", make_frames(60))))
        store.save(attempt_row("run-1", "small"))

        big = with_noise(make_frames(2000, images_every=0), in_images=in_images)
        with pytest.raises(RecordingError, match="disk full while writing") as caught:
            record(recorder, "big", big)
        assert "\n" not in str(caught.value)

        # What was written of the big one is gone, so there is room again, and recording goes on.
        assert record(recorder, "again", make_frames(20)).num_frames == 20

    with open_run(run_dir) as run:
        (kept,) = run.recorded_attempts()
        assert np.array_equal(kept.frames().action, [frame.action for frame in make_frames(60)])
        with kept.video("agentview") as video:
            assert len(list(video.frames())) == 12


def test_a_database_on_a_full_disk_is_one_line_and_keeps_its_rows(small_disk: Path) -> None:
    with RunStore(database_url(small_disk), "run-1") as store:
        store.save(run_row("run-1"), attempt_row("run-1", "a"))
        with pytest.raises(RecordingError, match="disk is full") as caught:
            fill(store)
        assert "\n" not in str(caught.value)
        assert [row.attempt_id for row in store.rows(AttemptRow)] == ["a"]
