"""Real-time chunking is lerobot's."""

from __future__ import annotations

import pytest
import torch
from lerobot.configs import RTCAttentionSchedule
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor

from dayshift.policy.smolvla.guidance import MAX_GUIDANCE, Guidance, guidance_weights
from dayshift.policy.smolvla.model import flow_time
from dayshift.policy.smolvla.parity import random_requests
from dayshift.policy.smolvla.parity_cases import ParityCase
from dayshift.policy.smolvla.policy import SmolVLAPolicy


@pytest.mark.parametrize(("num_frozen", "num_guided"), [(0, 0), (0, 10), (3, 8), (10, 10), (4, 2), (3, 50)])
@pytest.mark.parametrize("step", range(10))
def test_a_step_is_lerobots(num_frozen: int, num_guided: int, step: int) -> None:
    config = RTCConfig(
        enabled=True,
        prefix_attention_schedule=RTCAttentionSchedule.EXP,
        max_guidance_weight=MAX_GUIDANCE,
        execution_horizon=num_guided,
    )
    generator = torch.Generator().manual_seed(step)
    actions, velocity, target = (torch.randn((2, 10, 7), generator=generator) for _ in range(3))
    time = flow_time(step, 10)
    theirs = RTCProcessor(config).denoise_step(
        x_t=actions,
        prev_chunk_left_over=target,
        inference_delay=num_frozen,
        time=time,
        original_denoise_step_partial=lambda _: velocity,
    )
    weights = guidance_weights(num_frozen, num_guided, 10)
    ours = Guidance(target, weights.expand(2, -1)[..., None]).correct(velocity, actions, time)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_rows_without_weights_are_not_guided(policy: SmolVLAPolicy, case: ParityCase) -> None:
    settings = policy.config.policy
    inputs = policy.collate([policy.prepare(request) for request in random_requests(case)[:2]])
    shape = (2, settings.chunk_size, settings.max_action_dim)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weights = torch.zeros((2, settings.chunk_size, 1))
    weights[1, :4] = 1.0
    free = policy.model.sample_actions(inputs, noise)
    guided = policy.model.sample_actions(inputs, noise, Guidance(torch.zeros(shape), weights))
    assert torch.equal(guided[0], free[0])
    assert guided[1, :4].abs().mean() < 0.3 * free[1, :4].abs().mean()


def test_slices_make_the_whole(policy: SmolVLAPolicy, case: ParityCase) -> None:
    settings = policy.config.policy
    inputs = policy.collate([policy.prepare(request) for request in random_requests(case)[:1]])
    noise = torch.randn((1, settings.chunk_size, settings.max_action_dim))
    cache = policy.model.allocate_cache(1, inputs.image_mask.shape[1], inputs.token_ids.shape[1])
    policy.model.encode_prefix(inputs, cache)
    actions = noise
    for steps in (range(3), range(3, 4), range(4, 10)):
        actions = policy.model.denoise(actions, cache, steps)
    assert torch.equal(actions, policy.model.denoise(noise, cache))
