"""What was not recorded is rendered exactly: with the real simulator, in the renderer's own process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from dayshift.dataset_export.recorder import Recorder
from dayshift.policy.expert import ScriptedExpert
from dayshift.sim.types import CAMERAS, Frame, RolloutSpec, RolloutStart
from dayshift.sim.worker import RobotSimulator
from dayshift.webui.exact import ExactRenderer, RenderingError
from dayshift.webui.pictures import Moment, encode_jpeg
from tests.webui.made_runs import make_frame, make_spec, make_start

pytestmark = pytest.mark.slow  # MuJoCo is started twice

SPEC = RolloutSpec(
    task="turn_on_the_stove",
    init_state_id=0,
    seed=1,
    max_steps=12,
    instruction="turn on the stove",
    camera_hz=20,
    image_size=64,
)


def moment(attempt_id: str, index: int) -> Moment:
    return Moment(attempt_id=attempt_id, index=index, num_frames=12, t=0.0, is_over=False)


def test_a_picture_that_was_not_recorded_is_the_one_that_would_have_been(tmp_path: Path) -> None:
    frames: list[Frame] = []
    with Recorder(tmp_path) as recorder, RobotSimulator(ScriptedExpert) as simulator:

        def on_start(spec: RolloutSpec, start: RolloutStart) -> None:
            recorder.on_start("attempt", spec, start)

        def on_frame(frame: Frame) -> None:
            frames.append(frame)
            recorder.on_frame("attempt", frame.index / 20, replace(frame, images={}))

        simulator.run(SPEC, on_start, on_frame)
        recorder.on_end("attempt")
    renderer = ExactRenderer()
    try:
        for index in (7, 3):
            found = asyncio.run(renderer.render(tmp_path, moment("attempt", index)))
            assert {picture.camera: picture.jpeg for picture in found} == {
                camera: encode_jpeg(frames[index].images[camera]) for camera in CAMERAS
            }
    finally:
        renderer.close()


def test_a_state_of_another_simulator_is_refused_once(tmp_path: Path) -> None:
    with Recorder(tmp_path) as recorder:
        recorder.on_start("strange", make_spec(), make_start())  # its state fits no scene
        recorder.on_frame("strange", 0.0, make_frame(0, num_frames=1, has_images=False))
        recorder.on_end("strange")
    renderer = ExactRenderer()
    try:
        with pytest.raises(RenderingError, match="cannot be rendered here"):
            asyncio.run(renderer.render(tmp_path, moment("strange", 0)))
        renderer.close()
        with pytest.raises(RenderingError):  # without starting a process again
            asyncio.run(renderer.render(tmp_path, moment("strange", 0)))
        assert renderer._pool is None
    finally:
        renderer.close()
