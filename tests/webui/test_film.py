from __future__ import annotations

import itertools
from pathlib import Path

import av
import numpy as np
import pytest

from dayshift.types import DayshiftError
from dayshift.webui.film import FPS, FilmOptions, film_times, is_in_review, make_film
from dayshift.webui.film_layout import HEIGHT, WIDTH, clock
from dayshift.webui.run_index import RunIndex


def test_the_operation_runs_faster_than_the_reviews(index: RunIndex) -> None:
    times = list(film_times(index, FilmOptions(speed=30, review_speed=10)))
    hours = index.robot("robot-1").hours
    running = [(t, speed) for t, speed in times if t < index.end_s]
    assert {speed for t, speed in running if is_in_review(hours, t)} == {10}
    assert {speed for t, speed in running if not is_in_review(hours, t)} == {30}
    assert all(b[0] - a[0] == pytest.approx(a[1] / FPS) for a, b in itertools.pairwise(running))
    assert times[-1][0] == index.end_s


def test_a_film_shows_the_cameras_of_its_moment(made_run: Path, tmp_path: Path) -> None:
    film = make_film(made_run, tmp_path / "run.mp4", FilmOptions(speed=60, review_speed=60, from_s=2, to_s=6))
    frames: list[np.ndarray] = []
    with av.open(str(tmp_path / "run.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.average_rate) == (WIDTH, HEIGHT, FPS)
        frames += [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == film.num_frames
    # The red squares of the made pictures move from frame to frame.
    red = [
        np.argwhere((f[..., 0] > 200) & (f[..., 1] < 110) & (f[..., 2] < 110))[:, 1].mean()
        for f in frames[:2]
    ]
    assert red[0] != red[1]
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (FilmOptions(speed=0), "allowed are 0.1 to 1000"),
        (FilmOptions(robot="robot-9"), "this run has robot-1, robot-2"),
        (FilmOptions(from_s=1e9), "nothing to film"),
    ],
)
def test_a_mistake_is_told_in_one_line_and_leaves_no_file(
    made_run: Path, tmp_path: Path, options: FilmOptions, reason: str
) -> None:
    with pytest.raises(DayshiftError, match=reason):
        make_film(made_run, tmp_path / "run.mp4", options)
    assert list(tmp_path.iterdir()) == []


def test_a_film_never_replaces_a_file(made_run: Path, tmp_path: Path) -> None:
    (tmp_path / "run.mp4").write_text("mine")
    with pytest.raises(DayshiftError, match="exists already"):
        make_film(made_run, tmp_path / "run.mp4")
    assert (tmp_path / "run.mp4").read_text() == "mine"


def test_the_clock() -> None:
    assert [clock(s) for s in (0, 59.94, 61.5, 3661)] == ["0:00:00.0", "0:00:59.9", "0:01:01.5", "1:01:01.0"]


def test_a_place_that_takes_no_file_is_one_line(made_run: Path, tmp_path: Path) -> None:
    with pytest.raises(DayshiftError, match=r"run.mp4 cannot be written \(No such file or directory\)"):
        make_film(made_run, tmp_path / "nowhere" / "run.mp4")
