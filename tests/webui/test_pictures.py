from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from dayshift.webui.pictures import Pictures, encode_jpeg
from dayshift.webui.run_index import RunIndex
from tests.webui.made_runs import IMAGE_SIZE, make_image


@pytest.fixture
def pictures(made_run: Path, index: RunIndex) -> Iterator[Pictures]:
    pictures = Pictures(made_run, index.run.fps)
    yield pictures
    pictures.close()


def decode(jpeg: bytes) -> np.ndarray:
    image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    return image


def shown_index(jpeg: bytes) -> int:
    """The control step that a made picture shows: where its bright square is (mirrored back)."""
    image = decode(jpeg)
    red = (image[28, ::-1, 2] > 180) & (image[28, ::-1, 1] < 120)
    return round(float(np.flatnonzero(red).mean()) - 3.5) - 16


def test_every_control_step_of_an_attempt_can_be_found_and_shows_its_own_picture(
    index: RunIndex, pictures: Pictures
) -> None:
    robot = index.robot("robot-1")
    attempt = robot.attempts[1]
    times = pictures.frame_times(attempt.attempt_id)
    assert len(times) == 40
    for number, t in enumerate(times):
        moment = pictures.moment(robot, t)
        assert moment is not None
        assert (moment.attempt_id, moment.index, moment.t) == (attempt.attempt_id, number, t)
        (agentview,) = pictures.recorded(moment, ("agentview",))
        assert agentview.index == number - number % 5  # recorded every fifth control step
        assert shown_index(agentview.jpeg) == agentview.index


def test_between_attempts_the_last_picture_stands(index: RunIndex, pictures: Pictures) -> None:
    robot = index.robot("robot-1")
    first, second = robot.attempts[:2]
    between = (first.end_s + second.start_s) / 2
    moment = pictures.moment(robot, between)
    assert moment is not None
    assert (moment.attempt_id, moment.index, moment.is_over) == (first.attempt_id, 39, True)
    assert pictures.moment(robot, first.start_s - 0.01) is None


def test_an_attempt_without_files_shows_the_one_before(index: RunIndex, pictures: Pictures) -> None:
    robot = index.robot("robot-1")
    moment = pictures.moment(robot, robot.attempts[3].end_s)  # three are recorded
    assert moment is not None
    assert moment.attempt_id == robot.attempts[2].attempt_id


def test_stepping_goes_through_every_control_step_and_on_into_the_next_attempt(
    index: RunIndex, pictures: Pictures
) -> None:
    robot = index.robot("robot-1")
    expected = [t for attempt in robot.attempts[:3] for t in pictures.frame_times(attempt.attempt_id)]
    forward = [expected[0]]
    while len(forward) < len(expected):
        forward.append(pictures.neighbour(robot, forward[-1], 1))
    assert forward == expected
    assert pictures.neighbour(robot, expected[41], -2) == expected[39]
    assert pictures.neighbour(robot, expected[0], -1) == expected[0]


def test_pictures_are_mirrored_back() -> None:
    image = make_image(90, 0)
    decoded = decode(encode_jpeg(image))
    assert decoded[:, -IMAGE_SIZE // 8 + 1 :].mean() > 240  # white on the left as recorded: right as seen
    assert decoded[:, :8].mean() < 110
    assert decoded[28, -20 - 1 :, 2].max() > 180  # red stays red
