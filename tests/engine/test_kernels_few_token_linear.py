"""Linear layers of a few tokens, against their torch twins."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.kernels import few_token_linear, one_token_stream, reference, tiled_linear
from dayshift.engine.models.config import Activation
from tests.engine.test_kernels_triton import Launch, assert_close, randn
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch

SIZES = [(40, 24), (129, 700)]  # (num_rows, size): within one tile, and beyond it in both directions


def weights(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return randn(num_rows, size, dtype=dtype, seed=7) / size**0.5


# The interpreter truncates to bfloat16 and multiplies its matrices wrongly: that is for the GPU.
CASES = [
    pytest.param(num_tokens, size, dtype, marks=[pytest.mark.gpu] if dtype == torch.bfloat16 else [])
    for num_tokens in (0, 1, 2, 16, 33)
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


@pytest.mark.parametrize("sizes", [*SIZES, (3, 4096)])  # two and four rows at a time, or fewer than programs
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_streamed_rows(launch: Launch, sizes: tuple[int, int], dtype: torch.dtype):
    num_rows, size = sizes
    x, residual = randn(1, size, dtype=dtype), randn(1, size, dtype=dtype, seed=1)
    norm_weight, bias = randn(size, dtype=torch.float32, seed=2), randn(num_rows, dtype=dtype, seed=3)
    weight, gate_up = weights(num_rows, size, dtype), weights(2 * num_rows, size, dtype)

    assert_close(launch(streamed, x, weight, bias)[0], reference.linear(x, weight, bias))
    actual = launch(streamed, x, weight, bias, residual, norm_weight)
    expected = reference.norm_linear(x, residual, norm_weight, 1e-5, weight, bias)
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)
    actual = launch(streamed, x, gate_up, None, residual, norm_weight, "silu")
    expected = reference.norm_gated_linear(x, residual, norm_weight, 1e-5, gate_up, "silu")
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)


def streamed(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    kind: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`one_token_stream.multiply`, without names."""
    return one_token_stream.multiply(
        x, weight, bias=bias, residual=residual, norm_weight=norm_weight, eps=1e-5, kind=kind
    )


@pytest.mark.parametrize("num_splits", [1, 3, 4])
@pytest.mark.parametrize("kind", [None, "silu"])
def test_parts_of_a_product(launch: Launch, num_splits: int, kind: Activation | None):
    x, weight = randn(18, 500, dtype=torch.float32), weights(2 * 77, 500, torch.float32)
    bias = None if kind else randn(2 * 77, dtype=torch.float32, seed=2)
    tiles = tiled_linear.Tiles(rows=32, columns=64, num_splits=num_splits, num_stages=2)
    expected = reference.linear(x, weight, bias)
    if kind is not None:
        expected = reference.gated_activation(expected, kind)
    first = launch(tiled_linear.multiply, x, weight, bias, kind, tiles)
    assert_close(first, expected)
    # What counts the parts is ready for the next launch, and neighbours change nothing.
    again = launch(tiled_linear.multiply, x[1:], weight, bias, kind, tiles)
    assert torch.equal(again, first[1:])


@given(
    num_tokens=st.integers(2, 64),
    num_weight_rows=st.integers(1, 200_000),
    size=st.integers(1, 40_000),
    processors=st.integers(1, 200),
    element_size=st.sampled_from([2, 4]),
)
def test_tiles_fit(num_tokens: int, num_weight_rows: int, size: int, processors: int, element_size: int):
    tiles = tiled_linear.tiles_for(num_tokens, num_weight_rows, size, processors, element_size)
    assert tiles.num_stages >= 2
    if tiles.num_splits > 1:  # every part has something to do, and all of them run at once
        assert (tiles.num_splits - 1) * tiles.columns < size
        assert -(-num_weight_rows // tiles.rows) * tiles.num_splits <= 3 * processors
