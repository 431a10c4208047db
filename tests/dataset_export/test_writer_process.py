from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from recording_samples import make_frames, make_spec, make_start

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.durable import only_writer
from dayshift.dataset_export.errors import RecordingError
from dayshift.dataset_export.recorder import Recording
from dayshift.dataset_export.writer_process import AttemptRecording, RecorderProcess
from dayshift.sim.types import Frame


def send(attempt: AttemptRecording, frames: list[Frame]) -> None:
    for frame in frames:
        attempt.on_frame(frame)


def record(
    recorder: RecorderProcess,
    attempt_id: str,
    num_frames: int,
    seed: int = 0,
    then: Callable[[], object] = lambda: None,
) -> Recording:
    with recorder.attempt(attempt_id) as attempt:
        attempt.on_start(make_spec(), make_start(seed))
        send(attempt, make_frames(num_frames, images_every=2, seed=seed))
        then()
        return attempt.finish()


def test_robots_wait_for_a_full_queue_and_nothing_is_dropped(tmp_path: Path) -> None:
    recordings: dict[str, Recording] = {}
    with RecorderProcess(tmp_path, now=time.monotonic, queue_capacity=2) as recorder:

        def operate(robot: str, seed: int) -> None:
            for k in range(3):
                recordings[f"{robot}-{k}"] = record(recorder, f"{robot}-{k}", 100, seed)

        threads = [threading.Thread(target=operate, args=(f"r{i}", i)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = recorder.stats

    assert stats.num_frames == 4 * 3 * 100
    assert stats.num_waits > 0
    assert 0 < stats.longest_wait_s <= stats.waited_s
    assert len(recordings) == 12
    for attempt_id, recording in recordings.items():
        table = files.read_frames(tmp_path / "attempts" / attempt_id / files.FRAMES)
        expected = make_frames(100, images_every=0, seed=int(attempt_id[1]))
        assert np.array_equal(table.action, [frame.action for frame in expected])
        assert recording.num_images == {"agentview": 50, "wrist": 50}
        assert np.all(np.diff(table.t) >= 0)


def test_leaving_by_an_exception_throws_the_attempt_away(tmp_path: Path) -> None:
    with RecorderProcess(tmp_path, now=time.monotonic) as recorder:
        record(recorder, "kept", 10)
        with pytest.raises(ZeroDivisionError):
            record(recorder, "lost", 5, then=lambda: 1 / 0)
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["kept"]


def test_an_attempt_whose_simulator_never_started_has_no_files(tmp_path: Path) -> None:
    with RecorderProcess(tmp_path, now=time.monotonic) as recorder:
        assert recorder.attempt("a").finish().num_frames == 0
    assert list((tmp_path / "attempts").iterdir()) == []


def test_a_refused_frame_is_told_to_its_robot_and_to_no_other(tmp_path: Path) -> None:
    with RecorderProcess(tmp_path, now=time.monotonic) as recorder:
        with recorder.attempt("gap") as attempt:
            attempt.on_start(make_spec(), make_start())
            attempt.on_frame(make_frames(3)[2])
            with pytest.raises(RecordingError, match="frame 2 came where frame 0 was due"):
                attempt.finish()
        assert record(recorder, "whole", 5).num_frames == 5
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["whole"]


def test_a_dead_writer_is_an_error_for_every_robot_and_never_a_hang(tmp_path: Path) -> None:
    recorder = RecorderProcess(tmp_path, now=time.monotonic, queue_capacity=2)
    record(recorder, "before", 5)
    attempt = recorder.attempt("during")
    attempt.on_start(make_spec(), make_start())
    assert recorder.process_id is not None
    os.kill(recorder.process_id, signal.SIGKILL)
    with pytest.raises(RecordingError, match=r"has ended \(exit code -9\)"):
        send(attempt, make_frames(5000, images_every=1))
    with pytest.raises(RecordingError, match="has ended"):
        recorder.attempt("after")
    recorder.close()
    assert files.read_frames(tmp_path / "attempts" / "before" / files.FRAMES).success[-1]


def test_a_recorder_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        RecorderProcess(tmp_path / "file" / "run-1", now=time.monotonic) as recorder,
        pytest.raises(RecordingError, match=r"^cannot write .*run-1: Not a directory$"),
    ):
        record(recorder, "a", 5)


def test_ctrl_c_does_not_reach_the_writer(tmp_path: Path) -> None:
    with RecorderProcess(tmp_path, now=time.monotonic) as recorder:
        record(recorder, "first", 5)
        assert recorder.process_id is not None
        os.kill(recorder.process_id, signal.SIGINT)
        assert record(recorder, "second", 5).num_frames == 5


def record_and_vanish(run_dir: Path) -> None:
    """Queue the end of an attempt and be gone before the writer can answer."""
    recorder = RecorderProcess(run_dir, now=time.monotonic)
    attempt = recorder.attempt("a")
    attempt.on_start(make_spec(), make_start())
    send(attempt, make_frames(200))
    threading.Thread(target=attempt.finish, daemon=True).start()
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_whose_run_was_killed_ends_in_silence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=record_and_vanish, args=(tmp_path,))
    process.start()
    process.join()
    with only_writer(tmp_path, patience_s=60.0):  # the writer has ended
        assert "Traceback" not in capfd.readouterr().err


def record_until_the_writer_waits(run_dir: Path) -> None:
    """Send a whole attempt, and be gone when the writer wants to begin."""
    recorder = RecorderProcess(run_dir, now=time.monotonic)
    attempt = recorder.attempt("a")
    attempt.on_start(make_spec(), make_start())
    send(attempt, make_frames(2, image_size=16))
    threading.Thread(target=attempt.finish, daemon=True).start()
    (run_dir.parent / "writer.pid").write_text(str(recorder.process_id))
    its_files = Path(f"/proc/{recorder.process_id}/fd")
    while run_dir not in [path.resolve() for path in its_files.iterdir()]:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_writer_that_begins_when_its_run_is_gone_writes_nothing(tmp_path: Path) -> None:
    """What the run had sent would otherwise appear behind the back of whoever repaired or resumed it."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=record_until_the_writer_waits, args=(run_dir,))
    with only_writer(run_dir):  # its writer waits, as for that of a run before
        process.start()
        process.join()
    writer = int((tmp_path / "writer.pid").read_text())
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(writer).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.05)
    assert list((run_dir / files.ATTEMPTS).iterdir()) == []


def resident_mb(process_id: int) -> float:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024**2


def test_memory_does_not_grow_with_the_number_of_attempts(tmp_path: Path) -> None:
    with RecorderProcess(tmp_path, now=time.monotonic) as recorder:
        assert recorder.process_id is not None
        for number in range(20):
            record(recorder, f"early{number}", 20)
        before = resident_mb(recorder.process_id)
        for number in range(100):
            record(recorder, f"late{number}", 20)
        assert resident_mb(recorder.process_id) < before + 15
