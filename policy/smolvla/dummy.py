"""Checkpoints with random weights of an exact shape, for benchmarks: speed depends on nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from dayshift.policy.smolvla.config import (
    Feature,
    PolicyConfig,
    SmolVLAConfig,
    TextConfig,
    VisionConfig,
    VlmConfig,
)
from dayshift.policy.smolvla.folders import BUNDLED_VLM
from dayshift.policy.smolvla.model import SmolVLA
from dayshift.policy.smolvla.weights import WEIGHTS_FILE, checkpoint_names

_MAX_TEXT_LENGTH = 48


def _policy(
    *, side: int, num_layers: int, chunk_size: int, max_dim: int, num_steps: int = 10
) -> PolicyConfig:
    camera = Feature("VISUAL", (3, 256, 256))
    return PolicyConfig(
        type="smolvla",
        input_features={
            "observation.images.image": camera,
            "observation.images.image2": camera,
            "observation.state": Feature("STATE", (8,)),
        },
        output_features={"action": Feature("ACTION", (7,))},
        vlm_model_name=BUNDLED_VLM,
        chunk_size=chunk_size,
        n_action_steps=min(10, chunk_size),
        max_state_dim=max_dim,
        max_action_dim=max_dim,
        resize_imgs_with_padding=(side, side),
        num_steps=num_steps,
        num_vlm_layers=num_layers,
    )


SHAPES = {
    "small": SmolVLAConfig(  # `SIZES["small"]` of `policy.training`
        policy=_policy(side=128, num_layers=4, chunk_size=16, max_dim=8),
        vlm=VlmConfig(
            text_config=TextConfig(
                vocab_size=512,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
                head_dim=32,
            ),
            vision_config=VisionConfig(
                hidden_size=192,
                intermediate_size=768,
                num_hidden_layers=4,
                num_attention_heads=6,
                image_size=128,
                patch_size=8,
            ),
            scale_factor=4,
        ),
    ),
    "450m": SmolVLAConfig(  # lerobot/smolvla_base
        policy=_policy(side=512, num_layers=16, chunk_size=50, max_dim=32),
        vlm=VlmConfig(
            text_config=TextConfig(
                vocab_size=49280,
                hidden_size=960,
                intermediate_size=2560,
                num_hidden_layers=32,
                num_attention_heads=15,
                num_key_value_heads=5,
                head_dim=64,
            ),
            vision_config=VisionConfig(
                hidden_size=768,
                intermediate_size=3072,
                num_hidden_layers=12,
                num_attention_heads=12,
                image_size=512,
                patch_size=16,
            ),
            scale_factor=4,
        ),
    ),
}


def write_dummy_checkpoint(folder: Path, shape: str, seed: int = 0) -> None:
    """Write a checkpoint of one of `SHAPES` that `SmolVLAPolicy.load` takes. bfloat16 on the disk."""
    config = SHAPES[shape]
    vlm = folder / BUNDLED_VLM
    vlm.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config.policy)
    _write_json(vlm / "config.json", config.vlm)
    _byte_tokenizer().save(str(vlm / "tokenizer.json"))
    step = {"registry_name": "tokenizer_processor", "config": {"max_length": _MAX_TEXT_LENGTH}}
    _write_json(folder / "policy_preprocessor.json", {"steps": [step]})
    _write_json(folder / "policy_postprocessor.json", {"steps": []})
    save_file(_random_weights(config, seed), folder / WEIGHTS_FILE)


def _random_weights(config: SmolVLAConfig, seed: int) -> dict[str, torch.Tensor]:
    """As the checkpoint names them: what we keep fused lies in equal parts there, but for queries."""
    with torch.device("meta"):
        model = SmolVLA(config, _MAX_TEXT_LENGTH, config.policy.num_steps, None)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        scale = 0.02 if parameter.dim() > 1 else 0.0
        whole = torch.randn(parameter.shape, generator=generator) * scale + (0.0 if scale else 1.0)
        for part_name, part in zip(checkpoint_names(name), _parts(config, name, whole), strict=True):
            weights[part_name] = part.to(torch.bfloat16).contiguous()
    return weights


def _parts(config: SmolVLAConfig, name: str, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
    num_parts = len(checkpoint_names(name))
    if num_parts == 3 and not name.startswith("vision."):
        shape = config.text_shape
        return whole.split((shape.q_size, shape.kv_size, shape.kv_size))
    return whole.chunk(num_parts)


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=1))
