"""A batch that is computed slice by slice is the one that is computed whole."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence

import numpy as np
import pytest

from dayshift.engine.action_api import ActionRequest, Actions, CameraImage
from dayshift.engine.servable import Progress
from dayshift.policy.smolvla.batch_runner import MAX_BATCH_SIZE, num_slices
from dayshift.policy.smolvla.dummy import write_dummy_checkpoint
from dayshift.policy.smolvla.policy import SmolVLAPolicy
from dayshift.policy.smolvla.serving import PreparedActions, ServedSmolVLA

Running = Generator[Progress, Sequence[PreparedActions] | None, Iterable[Actions]]


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
    return to_its_end(served.infer([served.prepare(a_request(seed)) for seed in seeds]))


def to_its_end(running: Running) -> tuple[int, np.ndarray]:
    slices = 1
    while True:
        try:
            assert next(running) in (Progress.SLICE_DONE, Progress.OPEN)
        except StopIteration as end:
            return slices, np.array(list(end.value))
        slices += 1


@pytest.mark.parametrize("num_robots", [1, 9, 17])
def test_robots_of_every_slice_get_what_they_get_alone(served: ServedSmolVLA, num_robots: int):
    slices, actions = infer(served, range(num_robots))
    assert slices == num_slices(num_robots, num_steps=5) == len(served.slice_s(num_robots))
    assert all(seconds > 0 for seconds in served.slice_s(num_robots))
    for seed in {0, num_robots // 2, num_robots - 1}:
        _, alone = infer(served, range(seed, seed + 1))
        assert np.abs(actions[seed] - alone[0]).max() < 1e-4


def test_robots_join_until_nobody_is_sent(served: ServedSmolVLA):
    """After each group, whole or not; what they get does not depend on when they came."""
    members = [served.prepare(a_request(seed)) for seed in range(19)]
    running = served.infer(members[:3])
    assert next(running) is Progress.OPEN
    assert running.send(members[3:15]) is Progress.SLICE_DONE  # two groups
    assert next(running) is Progress.OPEN
    assert running.send(members[15:]) is Progress.OPEN
    assert running.send([]) is Progress.SLICE_DONE
    _, actions = to_its_end(running)
    _, whole = infer(served, range(19))
    assert np.abs(actions - whole).max() < 1e-5


def test_a_batch_that_nobody_joins_goes_on(served: ServedSmolVLA):
    running = served.infer([served.prepare(a_request(seed)) for seed in range(8)])
    assert next(running) is Progress.OPEN
    assert running.send([]) is Progress.SLICE_DONE


def test_a_full_batch_takes_nobody(served: ServedSmolVLA):
    running = served.infer([served.prepare(a_request(seed)) for seed in range(MAX_BATCH_SIZE)])
    assert [next(running) for _ in range(4)] == [Progress.SLICE_DONE] * 4  # three groups, and the prefix


def test_images_of_a_few_robots_are_a_slice_of_their_own():
    assert [num_slices(size, num_steps=10) for size in (1, 8, 9, 16, 24)] == [7, 7, 8, 8, 9]
    assert num_slices(1, num_steps=3) == 4  # the last one has a single Euler step
