"""Routing and experts of a few tokens, against their torch twins."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import get_args

import pytest
import torch

from dayshift.engine.kernels import few_token_experts, reference
from dayshift.engine.models.config import Activation
from tests.engine.test_kernels_moe import make_args
from tests.engine.test_kernels_triton import Launch, assert_close, randn
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch

BFLOAT16 = pytest.param(torch.bfloat16, marks=pytest.mark.gpu)  # wrong in the interpreter's products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_experts", "num_picked"), [(7, 3), (128, 8), (4, 1), (4, 4)])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_route_top_k(
    launch: Launch, num_experts: int, num_picked: int, is_normalized: bool, dtype: torch.dtype
):
    # Distinct in bfloat16 too: which of two equal logits comes first is not specified.
    shuffled = torch.rand(5, num_experts, generator=torch.Generator().manual_seed(1)).argsort(1)
    logits = (shuffled / 8 - num_experts / 16).to(dtype)
    weights, expert_ids = launch(few_token_experts.route_top_k, logits, num_picked, is_normalized)
    expected_weights, expected_ids = reference.route_top_k(logits, num_picked, is_normalized)
    assert expert_ids.tolist() == expected_ids.tolist()
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 40])
def test_moe_mlp(launch: Launch, num_tokens: int, dtype: torch.dtype):
    args = make_args(num_tokens, dtype)
    assert_close(launch(few_token_experts.moe_mlp, *args), reference.moe_mlp(*args))


def with_biases(*args: torch.Tensor, activation: Activation) -> torch.Tensor:
    """For the interpreter's process: keyword arguments do not travel."""
    x, weights, expert_ids, gate_up, down, gate_up_bias, down_bias = args
    return few_token_experts.moe_mlp(
        x,
        weights,
        expert_ids,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
    )


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_biases_and_activations(interpreter: ProcessPoolExecutor, num_tokens: int, activation: Activation):
    args = make_args(num_tokens, torch.float32)
    _, _, _, gate_up, down = args
    biases = randn(*gate_up.shape[:2], dtype=torch.float32), randn(*down.shape[:2], dtype=torch.float32)
    run = partial(with_biases, activation=activation)
    actual = interpreter.submit(run, *args, *biases).result(timeout=120)
    expected = reference.moe_mlp(*args, gate_up_bias=biases[0], down_bias=biases[1], activation=activation)
    assert_close(actual, expected)


def test_every_token_picks_the_same_experts(launch: Launch):
    """More picks of one expert than a tile holds."""
    x, weights, expert_ids, gate_up, down = make_args(40, torch.float32)
    expert_ids = expert_ids[:1].expand_as(expert_ids).contiguous()
    args = (x, weights, expert_ids, gate_up, down)
    assert_close(launch(few_token_experts.moe_mlp, *args), reference.moe_mlp(*args))


def test_a_slice_of_a_wider_tensor(launch: Launch):
    _, *rest = make_args(5, torch.float32)
    x = randn(5, 100, dtype=torch.float32)[:, 30:70]
    assert_close(launch(few_token_experts.moe_mlp, x, *rest), reference.moe_mlp(x, *rest))
