from __future__ import annotations

import hashlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from dayshift.sim.render import FrameRenderer
from dayshift.sim.rollout import rollout
from dayshift.sim.types import Fault, RolloutSpec


class TurnTheKnob:
    """Half-way through, sets the stove's knob: the burner lights up in the images."""

    def __init__(self, scene) -> None:
        self._scene = scene

    def reset(self, spec: RolloutSpec) -> None:
        self._step = 0

    def act(self, observation) -> np.ndarray:
        self._step += 1
        if self._step == 5:
            self._scene.data.joint("flat_stove_1_button").qpos[0] = 1.0
        return np.array([0.5, -0.5, -0.5, 0, 0, 0.5, 1], np.float32)


def spec_of(fault: Fault | None = None) -> RolloutSpec:
    return RolloutSpec(
        task="put the bowl on the plate",
        init_state_id=1,
        seed=21,
        max_steps=10,
        instruction="",
        fault=fault,
        camera_hz=20,
        image_size=96,
    )


def digests(images) -> dict[str, str]:
    return {camera: hashlib.sha256(image.tobytes()).hexdigest() for camera, image in images.items()}


RENDERER = FrameRenderer()  # used in the other process only


def render_later(spec, start, states) -> list[dict[str, str]]:
    RENDERER.load(spec, start)
    backwards = [digests(RENDERER.render(index, states[index])) for index in reversed(range(len(states)))]
    return backwards[::-1]


@pytest.fixture(scope="module")
def other_process():
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def live(env):
    starts, frames = [], []
    rollout(env, TurnTheKnob(env.scene), spec_of(), lambda _, start: starts.append(start), frames.append)
    return starts[0], frames


def test_frames_rendered_later_in_another_process_are_the_live_frames(live, other_process) -> None:
    start, frames = live
    states = [frame.sim_state for frame in frames]
    later = other_process.submit(render_later, spec_of(), start, states).result()
    assert later == [digests(frame.images) for frame in frames]
    assert len({digest["agentview"] for digest in later}) > 5  # the robot did move in them


def test_images_are_turned_by_180_degrees(live) -> None:
    """The stove is on the robot's left, and so is its burner in the turned agentview image."""
    _, frames = live
    before, after = (frames[index].images["agentview"].astype(int) for index in (4, 5))
    redder = (after - before)[..., 0] > 40
    rows, columns = np.nonzero(redder)
    assert len(rows) > 5
    assert columns.mean() < 48


def test_a_blocked_view_is_black_live_and_later(env, other_process) -> None:
    spec = spec_of(Fault(kind="blocked_view", at_step=3, num_steps=2))
    starts, frames = [], []
    rollout(env, TurnTheKnob(env.scene), spec, lambda _, start: starts.append(start), frames.append)
    is_black = [not frame.images["agentview"].any() for frame in frames]
    assert is_black == [index in (3, 4) for index in range(10)]
    states = [frame.sim_state for frame in frames]
    later = other_process.submit(render_later, spec, starts[0], states).result()
    assert later == [digests(frame.images) for frame in frames]


def test_rendering_before_load_is_a_programming_error() -> None:
    with pytest.raises(RuntimeError, match="load"):
        FrameRenderer().render(0, np.zeros(3))
