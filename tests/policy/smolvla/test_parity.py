"""Our actions are lerobot's, in every configuration, and depend on every input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dayshift.policy.smolvla.parity import (
    MAX_DIFFERENCE,
    compare,
    lerobot_actions,
    our_actions,
    random_requests,
)
from dayshift.policy.smolvla.parity_cases import CASES, ParityCase, Reference
from dayshift.policy.smolvla.policy import ActionRequest, SmolVLAPolicy


def _noise(policy: SmolVLAPolicy, batch: int, seed: int = 1) -> torch.Tensor:
    settings = policy.config.policy
    shape = (batch, settings.chunk_size, settings.max_action_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_actions_equal_lerobots(case: ParityCase, tmp_path: Path) -> None:
    result = compare(case, tmp_path)
    assert result.worst < MAX_DIFFERENCE
    assert result.largest_action > 0.5


def test_robots_with_other_cameras_and_sizes_share_a_batch(
    policy: SmolVLAPolicy, reference: Reference, case: ParityCase
) -> None:
    first, second, third = random_requests(case)
    rng = np.random.default_rng(5)
    requests = [
        first,
        replace(second, images={"image2": second.images["image2"]}),
        replace(third, images={"image": rng.integers(0, 256, (120, 200, 3), dtype=np.uint8)}),
    ]
    noise = _noise(policy, 3)
    together = our_actions(policy, requests, noise)
    for row in range(3):
        alone = lerobot_actions(reference, requests[row : row + 1], noise[row : row + 1])
        assert np.abs(together[row] - alone[0]).max() < MAX_DIFFERENCE


def test_every_input_changes_the_actions(policy: SmolVLAPolicy, case: ParityCase) -> None:
    request = random_requests(case)[0]
    other = random_requests(case, seed=9)[1]
    noise = _noise(policy, 1)
    before = our_actions(policy, [request], noise)
    changed: list[tuple[ActionRequest, torch.Tensor]] = [
        (replace(request, images={**request.images, "image": other.images["image"]}), noise),
        (replace(request, images={**request.images, "image2": other.images["image2"]}), noise),
        (replace(request, images={"image": request.images["image"]}), noise),
        (replace(request, state=other.state), noise),
        (replace(request, instruction=other.instruction), noise),
        (request, _noise(policy, 1, seed=2)),
    ]
    for changed_request, changed_noise in changed:
        after = our_actions(policy, [changed_request], changed_noise)
        assert np.abs(after - before).max() > 100 * MAX_DIFFERENCE


def test_number_of_euler_steps_can_be_set(checkpoint: Path, reference: Reference, case: ParityCase) -> None:
    policy = SmolVLAPolicy.load(checkpoint, num_steps=3)
    requests = random_requests(case)
    noise = _noise(policy, 3)
    reference.policy.config.num_steps = 3
    try:
        theirs = lerobot_actions(reference, requests, noise)
    finally:
        reference.policy.config.num_steps = 10
    assert np.abs(our_actions(policy, requests, noise) - theirs).max() < MAX_DIFFERENCE
