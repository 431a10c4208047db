"""Mixture of experts: the torch twin against float64 loops."""

import pytest
import torch

from dayshift.engine import kernels

# Relative to the largest value: a few units in the last place of the dtype.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = tuple(TOLERANCE)

Args = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def make_args(num_tokens: int, dtype: torch.dtype, num_experts: int = 7, num_picked: int = 3) -> Args:
    """x, weights, expert ids, gate_up, down; expert 0 gets nothing."""
    generator = torch.Generator().manual_seed(num_tokens)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    logits = randn(num_tokens, num_experts)
    logits[:, 0] = -10
    weights, expert_ids = kernels.route_top_k(logits, num_picked, True)
    gate_up, down = randn(num_experts, 2 * 24, 40) / 40**0.5, randn(num_experts, 40, 24) / 24**0.5
    return randn(num_tokens, 40), weights, expert_ids, gate_up, down


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    if actual.numel():
        error = (actual.double() - expected.double()).abs().max()
        assert error <= TOLERANCE[actual.dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("is_normalized", [False, True])
def test_route_top_k(is_normalized: bool):
    probabilities = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.15, 0.05]])
    weights, expert_ids = kernels.route_top_k(probabilities.log() + 3, 2, is_normalized)
    assert expert_ids.tolist() == [[1, 3], [0, 2]]
    expected = torch.tensor([[4 / 7, 3 / 7], [14 / 17, 3 / 17]])
    assert_close(weights, expected if is_normalized else torch.tensor([[0.4, 0.3], [0.7, 0.15]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_moe_mlp(num_tokens: int, dtype: torch.dtype):
    args = make_args(num_tokens, dtype)
    x, weights, expert_ids, gate_up, down = (
        arg if arg.dtype == torch.int64 else arg.double() for arg in args
    )
    expected = torch.zeros_like(x)
    for token in range(num_tokens):
        for weight, expert in zip(weights[token], expert_ids[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected[token] += weight * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
    assert_close(kernels.moe_mlp(*args), expected)


def test_moe_mlp_with_biases_and_another_activation():
    x, weights, expert_ids, gate_up, down = make_args(5, torch.float32)
    generator = torch.Generator().manual_seed(9)
    gate_up_bias = torch.randn(len(gate_up), 2 * 24, generator=generator)
    down_bias = torch.randn(len(down), 40, generator=generator)
    expected = torch.zeros(5, 40, dtype=torch.float64)
    for token in range(5):
        for weight, expert in zip(weights[token], expert_ids[token], strict=True):
            inner = gate_up[expert].double() @ x[token].double() + gate_up_bias[expert]
            inner = kernels.gated_activation(inner[None].float(), "clamped_swiglu")[0].double()
            expected[token] += weight * (down[expert].double() @ inner + down_bias[expert])
    actual = kernels.moe_mlp(
        x,
        weights,
        expert_ids,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation="clamped_swiglu",
    )
    assert_close(actual, expected)
