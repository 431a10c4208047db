"""`dayshift bench record` counts what was fed, while all robots feed, and what is on the disk."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from recording_samples import make_frames, make_spec, make_start

from dayshift.dataset_export import attempt_files as files
from dayshift.dataset_export.recorder_speed import RecordedFrames, measure_episodes, measure_waits


@pytest.fixture
def attempt() -> RecordedFrames:
    start = files.StartFile(fps=20, spec=make_spec(image_size=32), start=make_start())
    return RecordedFrames(start=start, frames=tuple(make_frames(30, images_every=1, image_size=32)))


def test_waits_of_robots_that_feed_at_a_rate(tmp_path: Path, attempt: RecordedFrames) -> None:
    """The frames of attempts that end after the time are written too, but are not in the rate."""
    row = measure_waits(tmp_path, [attempt], num_robots=2, pairs_per_s=40, duration_s=1.0)
    assert row.num_written == row.num_frames == 2 * 30
    assert 0 < row.pairs_per_s <= 43  # two robots, 20 frames in a second each, one more at its start and end
    assert 0 <= row.p50_ms <= row.p99_ms <= row.longest_ms


@pytest.mark.parametrize("takes_it", ["the main thread", "another thread"])
def test_an_interrupt_ends_the_robots_before_the_recorder(
    tmp_path: Path, attempt: RecordedFrames, takes_it: str
) -> None:
    """Otherwise each of their threads would fail, and print it. Whichever thread the system gives the signal
    to, Python's handler runs in the main one, once that does something."""

    def interrupt() -> None:
        while not (tmp_path / files.ATTEMPTS).exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=interrupt)
    user.start()
    if takes_it == "another thread":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with pytest.raises(KeyboardInterrupt):
            measure_waits(tmp_path, [attempt], num_robots=2, pairs_per_s=40, duration_s=600)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    user.join()


def test_rows_of_episodes(tmp_path: Path, attempt: RecordedFrames) -> None:
    rows = list(measure_episodes(tmp_path, attempt, num_episodes=5, rows_of=2, num_frames=7))
    assert [(row.first, row.last) for row in rows] == [(1, 2), (3, 4), (5, 5)]
    assert all(row.frames_per_s > 0 and row.rss_mb > 0 for row in rows)
    assert len(list((tmp_path / files.ATTEMPTS).iterdir())) == 5
