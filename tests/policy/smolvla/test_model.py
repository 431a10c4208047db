"""What serving relies on: fixed shapes, buffers used again, nothing read back to the host."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
import torch

from dayshift.policy.smolvla.config import PolicyConfig, SmolVLAConfig, VlmConfig
from dayshift.policy.smolvla.model import ImageTokens, PrefixInputs, SmolVLA
from dayshift.policy.smolvla.parity import random_requests
from dayshift.policy.smolvla.parity_cases import FULL_SIZE, ParityCase
from dayshift.policy.smolvla.policy import SmolVLAPolicy


@pytest.fixture
def noise(policy: SmolVLAPolicy) -> torch.Tensor:
    settings = policy.config.policy
    return torch.randn((3, settings.chunk_size, settings.max_action_dim))


def _inputs(
    policy: SmolVLAPolicy, case: ParityCase, seed: int, text_length: int | None = None
) -> PrefixInputs:
    prepared = [policy.prepare(request) for request in random_requests(case, seed)]
    return policy.collate(prepared, text_length=text_length)


def test_padding_of_texts_changes_nothing(
    policy: SmolVLAPolicy, case: ParityCase, noise: torch.Tensor
) -> None:
    shortest = policy.model.sample_actions(_inputs(policy, case, 0), noise)
    padded = policy.model.sample_actions(_inputs(policy, case, 0, text_length=48), noise)
    torch.testing.assert_close(padded, shortest, atol=1e-5, rtol=0)


def test_a_cache_may_be_used_again(policy: SmolVLAPolicy, case: ParityCase, noise: torch.Tensor) -> None:
    model = policy.model
    first, second = (_inputs(policy, case, seed, text_length=48) for seed in (0, 1))
    cache = model.allocate_cache(batch_size=3, num_images=2, text_length=48)
    model.encode_prefix(first, cache)
    actions = model.denoise(noise, cache)
    assert torch.equal(model.denoise(noise, cache), actions)  # the scratch slots leave no trace
    model.encode_prefix(second, cache)
    assert torch.equal(model.denoise(noise, cache), model.sample_actions(second, noise))
    model.encode_prefix(first, cache)
    assert torch.equal(model.denoise(noise, cache), actions)


def test_nothing_is_read_back_to_the_host(
    policy: SmolVLAPolicy, case: ParityCase, noise: torch.Tensor
) -> None:
    """Meta tensors have no values: reading one (which would break a CUDA graph) raises."""
    inputs = _inputs(policy, case, 0)
    meta = PrefixInputs(**{f.name: getattr(inputs, f.name).to("meta") for f in fields(inputs)})
    with torch.device("meta"):
        model = SmolVLA(policy.config, max_text_length=48, num_steps=10, image_tokens=ImageTokens(3, 5))
    actions = model.to("meta").sample_actions(meta, noise.to("meta"))
    assert actions.shape == noise.shape
    patches = torch.empty((3, 2, *policy.config.patch_shape.of_image), device="meta")
    assert model.embed_images(patches).shape == meta.images.shape


def test_bfloat16_stays_close(
    checkpoint: Path, policy: SmolVLAPolicy, case: ParityCase, noise: torch.Tensor
) -> None:
    half = SmolVLAPolicy.load(checkpoint, dtype=torch.bfloat16)
    exact = policy.model.sample_actions(_inputs(policy, case, 0), noise)
    rounded = half.model.sample_actions(_inputs(half, case, 0), noise)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().mean() < 0.05 * exact.abs().mean()


def test_published_size_has_lerobots_number_of_parameters() -> None:
    """lerobot counts 450,046,176; we leave out what no action depends on."""
    text, vision = dict(FULL_SIZE.text), dict(FULL_SIZE.vision) | {"patch_size": 16}
    vlm = {"text_config": text, "vision_config": vision, "scale_factor": FULL_SIZE.scale_factor}
    image = {"type": "VISUAL", "shape": [3, 256, 256]}
    policy = {
        "type": "smolvla",
        "vlm_model_name": "",
        "input_features": {
            "observation.images.image": image,
            "observation.state": {"type": "STATE", "shape": [8]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [7]}},
    }
    config = SmolVLAConfig(policy=msgspec.convert(policy, PolicyConfig), vlm=msgspec.convert(vlm, VlmConfig))
    with torch.device("meta"):
        model = SmolVLA(config, max_text_length=48, num_steps=10, image_tokens=None)
    head_and_norm = 49280 * 960 + 960
    last_layer = 2 * 960 * 960 + 3 * 960 * 2560 + 960  # queries, output, MLP, second norm
    assert sum(p.numel() for p in model.parameters()) + head_and_norm + last_layer == 450_046_176


def test_no_other_model_library_is_imported() -> None:
    code = (
        "import sys, dayshift.policy.smolvla.policy as _;"
        "print(*({'lerobot', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
