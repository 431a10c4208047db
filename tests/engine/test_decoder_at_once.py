"""Layers whose attention is one launch with the rotation and the store in front of it, against the same
layers launch by launch."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from dayshift.engine.kernels import token_attention
from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import AttentionBatch, Decoder, DecoderLayer
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_quantized_layer import GPT_OSS, QWEN3

LLAMA = replace(QWEN3, model_type="llama", has_qk_norm=False, num_heads=4, num_kv_heads=2)


def make_model(config: ModelConfig, dtype: torch.dtype, device: str) -> Decoder:
    """Random weights."""
    with torch.device(device):
        model = Decoder(config, num_positions=64).to(dtype)
    model.fill_position_table()
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.data.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
    return model.eval().requires_grad_(False)


def both_ways(config: ModelConfig, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Hidden states of one token behind 34 others of one sequence and of one behind 16 of another, beside
    padding: (2, hidden_size) each."""
    model = make_model(config, dtype, device)
    ints = {"dtype": torch.int32, "device": device}
    batch = AttentionBatch(
        positions=torch.tensor([34, 16, 0], **ints),
        slot_mapping=torch.tensor([16 + 2, 5 * 16, -1], device=device),
        block_tables=torch.tensor([[3, 2, 1], [4, 5, 0], [0, 0, 0]], **ints),
        seq_lens=torch.tensor([35, 17, 0], **ints),
        query_start=torch.tensor([0, 1, 2, 2], **ints),
    )
    token_ids = torch.tensor([7, 9, 0], device=device)
    generator = torch.Generator(device).manual_seed(1)
    pool = (2, config.num_layers, 6, 16, config.num_kv_heads, config.head_dim)
    kv_pool = torch.randn(pool, generator=generator, device=device).to(dtype)
    apart_pool, one_pool = kv_pool.clone(), kv_pool.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderLayer, "attends_at_once", lambda *_: False)
        apart = model(token_ids, batch, apart_pool)
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(DecoderLayer, "attends_at_once", lambda *_: True)
        launch = MagicMock(wraps=token_attention.attend)
        patch.setattr(token_attention, "attend", launch)
        one = model(token_ids, batch, one_pool)
    assert launch.call_count == config.num_layers
    # The second layer's keys and values come from inputs that are rounded twice, by way of the first's.
    torch.testing.assert_close(one_pool, apart_pool, rtol=2e-2, atol=1e-3 if dtype == torch.float32 else 3e-2)
    written = (one_pool != kv_pool).any(dim=-1).any(dim=-1).sum(dim=(2, 3))  # slots of keys, values, by layer
    assert written.tolist() == [[2] * config.num_layers] * 2
    return apart[:2].cpu(), one[:2].cpu()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("config", [QWEN3, GPT_OSS, LLAMA], ids=["norms", "sinks, window", "groups"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_one_launch_gives_what_several_do(
    interpreter: ProcessPoolExecutor, config: ModelConfig, dtype: torch.dtype, device: str
):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 matrices wrongly")
    if device == "cuda":
        apart, one = both_ways(config, dtype, device)
    else:
        apart, one = interpreter.submit(both_ways, config, dtype, device).result(timeout=300)
    error = (apart.double() - one.double()).abs().max()
    assert error <= (1e-4 if dtype == torch.float32 else 3e-2) * float(apart.abs().max())
