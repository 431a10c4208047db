"""Layers whose attention is one launch with what surrounds it, against the same layers launch by launch."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from dayshift.engine.models import quantized_layer
from dayshift.engine.models.config import ModelConfig, SlidingWindow
from dayshift.engine.models.decoder import AttentionBatch, Decoder
from dayshift.engine.models.quantized import put_packed, replace_by_quantized
from dayshift.engine.models.quantized_layer import QuantizedLayer, attend_in_one_launch
from dayshift.engine.quant.random_packed import random_packed
from tests.engine.test_kernels_triton import interpreter as interpreter

QWEN3 = ModelConfig(
    model_type="qwen3",
    vocab_size=50,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    max_positions=64,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    tie_word_embeddings=False,
    has_qkv_bias=False,
    has_qk_norm=True,
)
GPT_OSS = replace(
    QWEN3,
    model_type="gpt_oss",
    has_qk_norm=False,
    has_o_bias=True,
    has_sinks=True,
    sliding_window=SlidingWindow(size=20, is_sliding=(True, False)),
)


def make_model(config: ModelConfig, dtype: torch.dtype, device: str, holds: torch.dtype) -> Decoder:
    """Random weights that `holds` can hold, computed with in `dtype`; output projections are quantised."""
    with torch.device(device):
        model = Decoder(config, num_positions=64).to(dtype)
    model.fill_position_table()
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator, device=device)
        parameter.data.copy_((1 + 0.1 * noise if "norm" in name else 0.1 * noise).to(holds))
        if name.endswith("o_proj.weight"):
            replace_by_quantized(model, name)
            packed = random_packed(GGMLQuantizationType.Q4_0, tuple(parameter.shape), generator, std=0.1)
            put_packed(model, name, None, packed)
    return model.eval().requires_grad_(False)


def run(
    config: ModelConfig, dtype: torch.dtype, device: str, holds: torch.dtype, is_one_launch: bool
) -> list[Tensor]:
    """One token behind 34 others of one sequence, and one of padding.

    Returns its hidden state, and what each layer stored for it; all else in the pool stays as it was.
    """
    model = make_model(config, dtype, device, holds)
    ints = {"dtype": torch.int32, "device": device}
    batch = AttentionBatch(
        positions=torch.tensor([34, 0], **ints),
        slot_mapping=torch.tensor([16 + 2, -1], device=device),
        block_tables=torch.tensor([[3, 2, 1], [0, 0, 0]], **ints),
        seq_lens=torch.tensor([35, 0], **ints),
        query_start=torch.tensor([0, 1, 1], **ints),
    )
    token_ids = torch.tensor([7, 0], device=device)
    generator = torch.Generator(device).manual_seed(1)
    shape = (2, config.num_layers, 4, 16, config.num_kv_heads, config.head_dim)
    kv_pool = torch.randn(shape, generator=generator, device=device).to(holds).to(dtype)
    before = kv_pool.clone()
    if is_one_launch:
        attend_in_one_launch(model)
        assert all(isinstance(layer, QuantizedLayer) for layer in model.layers)
    with pytest.MonkeyPatch.context() as patch:
        launch = MagicMock(wraps=quantized_layer.attend_to_points)
        patch.setattr(quantized_layer, "attend_to_points", launch)
        hidden = model(token_ids, batch, kv_pool)
    assert launch.call_count == (config.num_layers if is_one_launch else 0)
    stored = kv_pool[:, :, 1, 2].clone()
    kv_pool[:, :, 1, 2] = before[:, :, 1, 2]
    assert torch.equal(kv_pool, before)
    return [hidden[:1].double().cpu(), *stored.double().cpu().unbind(1)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("config", [QWEN3, GPT_OSS], ids=["norms", "sinks, window"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_one_launch_gives_what_several_do(
    interpreter: ProcessPoolExecutor, config: ModelConfig, dtype: torch.dtype, device: str
):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 matrices wrongly")

    def computed(computed_in: torch.dtype, is_one_launch: bool) -> list[Tensor]:
        args = (config, computed_in, device, dtype, is_one_launch)
        if device == "cuda":
            return run(*args)
        return interpreter.submit(run, *args).result(timeout=300)

    exact = computed(torch.float32, False)
    apart, one = computed(dtype, False), computed(dtype, True)
    for ours, theirs, right in zip(one, apart, exact, strict=True):
        size = right.pow(2).mean().sqrt()
        error = (ours - right).pow(2).mean().sqrt() / size
        # Rounded no more often than by several launches; float32 adds in another order.
        most = 1.5 * (theirs - right).pow(2).mean().sqrt() / size if dtype == torch.bfloat16 else 1e-5
        assert error <= most
