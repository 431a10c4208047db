"""Linear layers of a few tokens, against their torch twins."""

import pytest
import torch

from dayshift.engine.kernels import few_token_linear, reference
from tests.engine.test_kernels_triton import Launch, assert_close, randn
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch

SIZES = [(40, 24), (129, 700)]  # (num_rows, size): within one tile, and beyond it in both directions


def weights(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return randn(num_rows, size, dtype=dtype, seed=7) / size**0.5


# The interpreter truncates to bfloat16 and multiplies its matrices wrongly: that is for the GPU.
CASES = [
    pytest.param(num_tokens, size, dtype, marks=[pytest.mark.gpu] if dtype == torch.bfloat16 else [])
    for num_tokens in (0, 1, 2, 16, 17)
    for size in SIZES
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    if num_tokens in (1, 16) or dtype != torch.float16
]


@pytest.mark.parametrize(("num_tokens", "sizes", "dtype"), CASES)
def test_linear(launch: Launch, num_tokens: int, sizes: tuple[int, int], dtype: torch.dtype):
    num_rows, size = sizes
    x, weight = randn(num_tokens, size, dtype=dtype), weights(num_rows, size, dtype)
    bias = randn(num_rows, dtype=dtype, seed=2)
    assert_close(launch(few_token_linear.linear, x, weight), reference.linear(x, weight))
    assert_close(launch(few_token_linear.linear, x, weight, bias), reference.linear(x, weight, bias))


@pytest.mark.parametrize(("num_tokens", "sizes", "dtype"), CASES)
def test_norm_linear(launch: Launch, num_tokens: int, sizes: tuple[int, int], dtype: torch.dtype):
    num_rows, size = sizes
    x, residual = randn(num_tokens, size, dtype=dtype), randn(num_tokens, size, dtype=dtype, seed=1)
    norm_weight, bias = randn(size, dtype=dtype, seed=2), randn(num_rows, dtype=dtype, seed=3)
    args = (x, residual, norm_weight, 1e-5, weights(num_rows, size, dtype), bias)
    for actual, expected in zip(
        launch(few_token_linear.norm_linear, *args), reference.norm_linear(*args), strict=True
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize(("num_tokens", "sizes", "dtype"), CASES)
def test_norm_gated_linear(launch: Launch, num_tokens: int, sizes: tuple[int, int], dtype: torch.dtype):
    num_rows, size = sizes
    x, residual = randn(num_tokens, size, dtype=dtype), randn(num_tokens, size, dtype=dtype, seed=1)
    norm_weight, gate_up = randn(size, dtype=dtype, seed=2), weights(2 * num_rows, size, dtype)
    args = (x, residual, norm_weight, 1e-5, gate_up, "silu" if num_tokens % 2 else "gelu_tanh")
    for actual, expected in zip(
        launch(few_token_linear.norm_gated_linear, *args), reference.norm_gated_linear(*args), strict=True
    ):
        assert_close(actual, expected)


def test_a_slice_of_a_wider_tensor(launch: Launch):
    wide, weight = randn(3, 100, dtype=torch.float32), weights(40, 24, torch.float32)
    assert_close(
        launch(few_token_linear.linear, wide[:, 10:34], weight), reference.linear(wide[:, 10:34], weight)
    )
