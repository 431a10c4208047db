"""SmolVLA on a GPU: its CUDA graphs compute what the model does, whatever is in a batch, on either stream."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dayshift.engine.action_api import ActionRequest, Actions, CameraImage
from dayshift.engine.servable import Progress, Sharing
from dayshift.policy.smolvla.dummy import write_dummy_checkpoint
from dayshift.policy.smolvla.policy import SmolVLAPolicy
from dayshift.policy.smolvla.serving import ServedSmolVLA

pytestmark = pytest.mark.gpu

SENTENCES = ("turn on the stove", "put the wine bottle on top of the cabinet", "go")
TOLERANCE = 0.03  # of bfloat16, beside actions of about 1


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder = tmp_path_factory.mktemp("policy")
    write_dummy_checkpoint(folder, "small")
    return folder


@pytest.fixture(scope="module", params=["slices", "streams"])
def served(checkpoint: Path, request: pytest.FixtureRequest) -> ServedSmolVLA:
    sharing: Sharing = request.param
    policy = SmolVLAPolicy.load(checkpoint, device="cuda", dtype=torch.bfloat16)
    return ServedSmolVLA("arm", policy, sharing)


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> ServedSmolVLA:
    """The same in float32 on the CPU."""
    return ServedSmolVLA("arm", SmolVLAPolicy.load(checkpoint))


def a_request(seed: int) -> ActionRequest:
    rng = np.random.default_rng(seed)
    cameras = ("observation.images.image", "observation.images.image2")[: 1 + seed % 2]
    side = 64 + 32 * (seed % 3)
    return ActionRequest(
        policy="arm",
        images={name: CameraImage(height=side, width=96, data=rng.bytes(side * 96 * 3)) for name in cameras},
        state=tuple(rng.random(8).tolist()),
        instruction=SENTENCES[seed % 3],
        seed=seed,
    )


def infer(policy: ServedSmolVLA, seeds: range) -> np.ndarray:
    return to_its_end(policy.infer([policy.prepare(a_request(seed)) for seed in seeds]))


def to_its_end(running: Generator[Progress, Any, Iterable[Actions]]) -> np.ndarray:
    while True:
        try:
            assert isinstance(next(running), Progress)
        except StopIteration as end:
            chunks: Iterable[Actions] = end.value
            return np.array(list(chunks))


@pytest.mark.parametrize("num_robots", [1, 3, 8, 24])
def test_graphs_compute_what_the_model_computes(served: ServedSmolVLA, exact: ServedSmolVLA, num_robots: int):
    assert np.abs(infer(served, range(num_robots)) - infer(exact, range(num_robots))).max() < TOLERANCE


def test_robots_that_join_get_what_they_get_in_one_batch(served: ServedSmolVLA, exact: ServedSmolVLA):
    if served.group_size is None:
        pytest.skip("nobody joins what runs beside")
    members = [served.prepare(a_request(seed)) for seed in range(19)]
    running = served.infer(members[:3])
    assert next(running) is Progress.OPEN
    assert running.send(members[3:15]) is Progress.SLICE_DONE
    assert next(running) is Progress.OPEN
    assert running.send(members[15:]) is Progress.OPEN
    assert running.send([]) is Progress.SLICE_DONE
    assert np.abs(to_its_end(running) - infer(exact, range(19))).max() < TOLERANCE


def test_what_the_batch_before_left_has_no_effect(served: ServedSmolVLA):
    alone = infer(served, range(5, 6))
    infer(served, range(30, 54))
    assert np.array_equal(infer(served, range(5, 6)), alone)
    infer(served, range(30, 34))
    assert np.array_equal(infer(served, range(5, 6)), alone)


def test_slices_are_timed(served: ServedSmolVLA):
    times = [served.slice_s(size) for size in (1, 24)]
    if times != [(), ()]:
        small, large = times
        assert all(second > 0 for second in small)
        assert sum(large) > sum(small)


def test_beside_a_busy_default_stream(served: ServedSmolVLA):
    """The LLM's stream is full; copies and graphs of the policy must not depend on what it does."""
    alone = infer(served, range(3))
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        matrix = (matrix @ matrix).clamp(-1, 1)
    assert np.array_equal(infer(served, range(3)), alone)
    torch.cuda.synchronize()
