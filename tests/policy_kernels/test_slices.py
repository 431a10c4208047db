"""A batch that is computed slice by slice is the one that is computed whole."""

from __future__ import annotations

import numpy as np
import pytest

from dayshift.engine.action_api import ActionRequest, CameraImage
from dayshift.engine.servable import Progress
from dayshift.policy.smolvla.batch_runner import BATCH_SIZES, num_slices
from dayshift.policy.smolvla.dummy import write_dummy_checkpoint
from dayshift.policy.smolvla.policy import SmolVLAPolicy
from dayshift.policy.smolvla.serving import ServedSmolVLA


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedSmolVLA:
    folder = tmp_path_factory.mktemp("policy")
    write_dummy_checkpoint(folder, "small")
    return ServedSmolVLA("arm", SmolVLAPolicy.load(folder, num_steps=5))


def a_request(seed: int) -> ActionRequest:
    rng = np.random.default_rng(seed)
    return ActionRequest(
        policy="arm",
        images={"image": CameraImage(height=24, width=32, data=rng.bytes(24 * 32 * 3))},
        state=tuple(rng.random(8).tolist()),
        instruction="turn on the stove",
        seed=seed,
    )


def infer(served: ServedSmolVLA, seeds: range) -> tuple[int, np.ndarray]:
    """How many slices, and the actions."""
    running = served.infer([served.prepare(a_request(seed)) for seed in seeds])
    slices = 1
    while True:
        try:
            assert next(running) is Progress.SLICE_DONE
        except StopIteration as end:
            return slices, np.array(end.value)
        slices += 1


@pytest.mark.parametrize("num_robots", [1, 9, 17])
def test_robots_of_every_slice_get_what_they_get_alone(served: ServedSmolVLA, num_robots: int):
    slices, actions = infer(served, range(num_robots))
    size = next(size for size in BATCH_SIZES if size >= num_robots)
    assert slices == num_slices(size, num_steps=5) == len(served.slice_s(num_robots))
    assert all(seconds > 0 for seconds in served.slice_s(num_robots))
    for seed in {0, num_robots // 2, num_robots - 1}:
        _, alone = infer(served, range(seed, seed + 1))
        assert np.abs(actions[seed] - alone[0]).max() < 1e-4


def test_images_of_many_robots_are_slices_of_their_own():
    assert [num_slices(size, num_steps=10) for size in BATCH_SIZES] == [6, 6, 6, 6, 8, 10]
    assert num_slices(1, num_steps=3) == 3  # the last one has a single Euler step
