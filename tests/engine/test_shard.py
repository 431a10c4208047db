"""Which part of a weight each process reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dayshift.engine.models.formats import load_model_config
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.models.shard import Shard


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_moe", "gpt_oss", "gemma3_text"])
def test_the_parts_of_a_model_are_the_whole(make_tiny_model: Callable[..., Path], model_type: str):
    """Every weight is in one part, in all, or (what is added once) in the first and zero in the other."""
    folder = make_tiny_model(model_type=model_type, num_hidden_layers=2, layer_types=None)
    whole, *parts = (
        dict(
            load_decoder(
                folder,
                dtype=torch.float32,
                device=torch.device("cpu"),
                num_positions=16,
                load_format="auto",
                seed=0,
                shard=shard,
            ).named_parameters()
        )
        for shard in (Shard(), Shard(0, 2), Shard(1, 2))
    )
    for name, weight in whole.items():
        first, second = (part[name] for part in parts)
        if name.endswith(("o_proj.bias", "experts_down_bias")):
            assert torch.equal(first, weight), name
            assert not second.any(), name
        elif first.shape == weight.shape:
            assert torch.equal(first, weight), name
            assert torch.equal(second, weight), name
        else:
            # Rows of fused weights change places; none is lost, and none is there twice.
            assert first.shape == second.shape, name
            together = torch.cat((first.flatten(), second.flatten()))
            assert torch.equal(together.sort().values, weight.flatten().sort().values), name


def test_a_part_is_a_view_of_the_file(tiny_model_dir: Path):
    """What is not in it is never read."""
    with safe_open(tiny_model_dir / "model.safetensors", framework="pt") as file:
        for name in ("embed_tokens", "layers.0.self_attn.o_proj"):
            weight = file.get_tensor(f"model.{name}.weight")
            parameter = {"embed_tokens": "embed.weight"}.get(name, "layers.0.o_proj.weight")
            part = Shard(1, 2).cut(parameter, weight, is_fused=True)
            assert part.numel() == weight.numel() // 2
            assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_a_part_has_its_share_of_heads_columns_and_vocabulary(make_tiny_model: Callable[..., Path]):
    config = load_model_config(make_tiny_model(model_type="qwen3_moe", num_hidden_layers=1))
    part = Shard(1, 2).of(config)
    assert (part.num_heads, part.num_kv_heads, part.vocab_size) == (2, 1, 256)
    assert config.moe is not None
    assert part.moe is not None
    assert (part.moe.num_experts, part.moe.intermediate_size) == (8, 24)
    assert 2 * part.kv_bytes_per_token(2) == config.kv_bytes_per_token(2)
