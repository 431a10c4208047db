"""llama.cpp's arithmetic against sums made one after the other in exact fractions, and against our own."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.block_pool import BlockPool
from dayshift.engine.kernels import reference
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models import llama_cpp_ops as ops
from dayshift.engine.models.llama_cpp import load_llama_cpp_decoder
from dayshift.engine.quant.dequantize import dequantize
from dayshift.engine.quant.packed import pack
from dayshift.types import DayshiftError
from tests.engine.test_decoder import logits_of, make_runner

Q = GGMLQuantizationType
Number = float | np.floating[Any]
MakeModel = Callable[..., Path]
LLAMA: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2, "head_dim": 32}


def fma(x: Number, y: Number, z: Number) -> np.float32:
    """One rounding, to float32; a fraction is rounded to float64 first, whose 29 more bits seldom matter."""
    return np.float32(float(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))))


def scalar_product(x: np.ndarray, integers: np.ndarray, scales: np.ndarray, shifts: np.ndarray) -> np.float32:
    """One row: integers (num_blocks, 32), scales and shifts (num_blocks,)."""
    lanes, shift = [np.float32(0)] * 8, np.float32(0)
    for block, whole, scale, minimum in zip(x.reshape(-1, 32), integers, scales, shifts, strict=True):
        largest = np.abs(block).max()
        step = np.float32(largest / np.float32(127))
        rounded = np.rint(block * (np.float32(127) / largest if largest else np.float32(0)))
        both = np.float32(step.astype(np.float16).astype(np.float32) * scale)
        total = np.float32(rounded.sum() * step).astype(np.float16)
        shift = fma(minimum, total, shift)
        for lane in range(8):
            here = slice(4 * lane, 4 * lane + 4)
            lanes[lane] = fma(both, (rounded[here] * whole[here]).sum(), lanes[lane])
    fours = [lanes[i] + lanes[i + 4] for i in range(4)]
    twos = [fours[0] + fours[2], fours[1] + fours[3]]
    return np.float32(twos[0] + twos[1]) + shift


@pytest.mark.parametrize("quant_type", ops.QUANT_TYPES)
@given(seed=st.integers(0, 2**31), num_blocks=st.integers(1, 3), size=st.sampled_from([1e-3, 1.0, 50.0]))
@settings(max_examples=10, deadline=None)
def test_products_are_summed_in_llama_cpps_order(quant_type: Q, seed: int, num_blocks: int, size: float):
    random = np.random.default_rng(seed)
    raw = gguf.quantize(random.standard_normal((4, 32 * num_blocks)).astype(np.float32), quant_type)
    x = (random.standard_normal((3, 32 * num_blocks)) * size).astype(np.float32)
    x[0, :32] = 0.0
    matrix = ops.block_matrix(pack(torch.from_numpy(raw), quant_type))
    integers = matrix.integers.permute(3, 0, 1, 2).reshape(4, num_blocks, 32).numpy()
    scales = matrix.scales.T.numpy()
    shifts = np.zeros_like(scales) if matrix.shifts is None else matrix.shifts.T.numpy()
    weights = integers * scales[..., None] + shifts[..., None]
    assert np.array_equal(weights.reshape(4, -1), dequantize(torch.from_numpy(raw), quant_type).numpy())
    expected = [[scalar_product(row, *of) for of in zip(integers, scales, shifts, strict=True)] for row in x]
    assert np.array_equal(ops.product(torch.from_numpy(x), matrix).numpy(), np.array(expected))


def test_exponentials_are_within_two_units_of_the_last_place() -> None:
    x = torch.linspace(-87.0, 88.0, 10_001)
    exact = x.double().exp()
    assert ((ops.exp(x) - exact).abs() <= 2.0 * torch.finfo(torch.float32).eps * exact).all()
    assert ops.exp(torch.tensor([float("-inf"), float("inf"), 0.0])).tolist() == [0.0, float("inf"), 1.0]


@pytest.mark.parametrize("num_queries", [1, 2, 19])
def test_attention_is_attention(num_queries: int) -> None:
    generator = torch.Generator().manual_seed(num_queries)
    q, k, v = (torch.randn(n, h, 32, generator=generator) for n, h in ((num_queries, 4), (37, 2), (37, 2)))
    mask = torch.ones(num_queries, 37, dtype=torch.bool).tril(37 - num_queries)
    ours = reference._attend(q, k, v, mask, 0.2, None)
    torch.testing.assert_close(ops.attention(q, k, v, 0.2), ours, atol=1e-5, rtol=1e-5)


def llama_cpp_runner(path: Path) -> ModelRunner:
    model = load_llama_cpp_decoder(path, num_positions=512)
    device = torch.device("cpu")
    pool = BlockPool(model.config, num_blocks=64, block_size=16, dtype=torch.float32, device=device)
    return ModelRunner(model, pool, max_num_seqs=4, max_context=512)


def test_a_model_differs_by_the_rounding_of_its_activations_alone(
    make_tiny_model: MakeModel, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_tiny_model(**LLAMA), Q.Q4_1, others={"token_embd.weight": Q.Q8_0})
    runner, token_ids = llama_cpp_runner(path), list(range(3, 60))
    whole = logits_of(runner, token_ids, [57])
    ours = logits_of(make_runner(path), token_ids, [57])
    assert 0 < (whole - ours).norm() < 0.15 * ours.norm()  # of random weights: 0.06
    assert torch.equal(logits_of(runner, token_ids, [20, 37])[-1:], whole)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculation": "history"}, "arithmetic llama.cpp needs speculation off, found history"),
        ({"dtype": "bfloat16"}, "arithmetic llama.cpp needs dtype float32, found bfloat16"),
        ({}, "needs a GGUF file of architecture llama"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    make_tiny_model: MakeModel, fields: dict[str, Any], message: str
) -> None:
    options: dict[str, Any] = {"speculation": "off"} | fields
    with pytest.raises(DayshiftError, match=message):
        Engine(EngineConfig(model=str(make_tiny_model()), device="cpu", arithmetic="llama.cpp", **options))


@pytest.mark.parametrize(
    ("quant_type", "message"),
    [(Q.Q4_0, "quantised as Q4_0; allowed are Q4_1, Q8_0"), (Q.F16, "needs quantised matrices")],
)
def test_other_types_are_refused(
    make_tiny_model: MakeModel, write_gguf: Callable[..., Path], quant_type: Q, message: str
) -> None:
    path = write_gguf(make_tiny_model(**LLAMA), quant_type)
    with pytest.raises(DayshiftError, match=message):
        load_llama_cpp_decoder(path, num_positions=64)
