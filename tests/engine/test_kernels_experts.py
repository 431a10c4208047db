"""Routing and the two ways of computing experts, against their torch twins."""

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.kernels import expert_tiles, few_token_experts, moe, reference, routing, tiled_experts
from dayshift.engine.models.config import Activation
from dayshift.types import DayshiftError
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
    weights, expert_ids = launch(routing.route_top_k, logits, num_picked, is_normalized)
    expected_weights, expected_ids = reference.route_top_k(logits, num_picked, is_normalized)
    assert expert_ids.tolist() == expected_ids.tolist()
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "size", "num_experts"), [(0, 8, 4), (1, 50, 7), (5, 64, 32), (18, 40, 5)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_router(
    launch: Launch, num_tokens: int, size: int, num_experts: int, has_bias: bool, dtype: torch.dtype
):
    x, residual = randn(num_tokens, size, dtype=dtype), randn(num_tokens, size, dtype=dtype, seed=1)
    norm, router = randn(size, dtype=dtype, seed=2), randn(num_experts, size, dtype=dtype, seed=3)
    bias = randn(num_experts, dtype=dtype, seed=4) if has_bias else None
    args = (x, residual, norm, 1e-5, router, bias)
    for actual, expected in zip(
        launch(routing.norm_router, *args), reference.norm_router(*args), strict=True
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num_picked", "size"), [(0, 2, 8), (1, 8, 50), (5, 3, 2100)])
def test_sum_picks(launch: Launch, num_tokens: int, num_picked: int, size: int, dtype: torch.dtype):
    outs = randn(num_tokens * num_picked, size, dtype=dtype)
    weights = randn(num_tokens, num_picked, dtype=torch.float32, seed=1)
    assert_close(launch(tiled_experts.sum_picks, outs, weights), reference.sum_picks(outs, weights))


def ordered(
    expert_ids: torch.Tensor, num_experts: int, tile_tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    listed = expert_tiles.tile_experts(expert_ids, num_experts, tile_tokens)
    return listed.order, listed.tiles


@given(
    picks=st.lists(st.sampled_from([0, 1, 1, 1, 4, 6]), min_size=1, max_size=200),
    tile_tokens=st.sampled_from([16, 32, 128]),
)
@settings(max_examples=15, deadline=None)
def test_every_pair_is_in_one_tile_of_its_expert(
    interpreter: ProcessPoolExecutor, picks: list[int], tile_tokens: int
):
    args = (torch.tensor(picks).unsqueeze(1), 8, tile_tokens)
    check_listed(picks, tile_tokens, *interpreter.submit(ordered, *args).result(timeout=120))


@pytest.mark.parametrize(("num_experts", "num_pairs"), [(20, 4097), (7, 32_769), (20, 66_000)])
def test_many_pairs(launch: Launch, num_experts: int, num_pairs: int):
    """Those that are read in turns, and those that are counted first. Half of them are of one expert, and one
    has none."""
    generator = torch.Generator().manual_seed(num_pairs)
    picks = torch.randint(0, num_experts - 1, (num_pairs, 1), generator=generator)
    picks[torch.rand(num_pairs, generator=generator) < 0.5] = 3
    order, tiles = launch(ordered, picks, num_experts, 128)
    check_listed(picks.flatten().tolist(), 128, order, tiles)


def check_listed(picks: list[int], tile_tokens: int, order: torch.Tensor, tiles: torch.Tensor) -> None:
    """Every pair is in one tile, which is of its expert."""
    assert order.tolist() == sorted(range(len(picks)), key=lambda pair: picks[pair])
    places = []
    for expert, first, count in tiles.tolist():
        assert 0 <= count <= tile_tokens
        assert all(picks[pair] == expert for pair in order[first : first + count].tolist())
        places += range(first, first + count)
    assert sorted(places) == list(range(len(picks)))


FEW, TILED = few_token_experts.moe_mlp, tiled_experts.moe_mlp


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(
    ("mixture", "num_tokens"), [(FEW, 0), (FEW, 1), (FEW, 4), (TILED, 0), (TILED, 5), (TILED, 50)]
)
def test_moe_mlp(launch: Launch, mixture: Any, num_tokens: int, dtype: torch.dtype):
    """With 7 experts, 3 to a token: 5 tokens take the first tiling, 50 the second."""
    args = make_args(num_tokens, dtype)
    assert_close(launch(mixture, *args), reference.moe_mlp(*args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_many_tokens(launch: Launch, dtype: torch.dtype):
    """Whole tiles, halves, a last one with few tokens; more pairs than a program lists at once."""
    args = make_args(1500, dtype)
    assert_close(launch(tiled_experts.moe_mlp, *args), reference.moe_mlp(*args))


@pytest.mark.gpu
def test_the_shape_of_a_model_on_a_gpu():
    """Tiles that fill the tensor cores, at each of the tilings; the sums do not depend on the run."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    gate_up, down = draw(16, 1536, 2048) / 45, draw(16, 2048, 768) / 28
    for num_tokens in (1, 4, 20, 80, 300):
        weights, expert_ids = reference.route_top_k(draw(num_tokens, 16), 4, True)
        args = (draw(num_tokens, 2048), weights, expert_ids, gate_up, down)
        actual = moe.moe_mlp(*args)
        assert_close(actual.cpu(), reference.moe_mlp(*args).cpu())
        assert torch.equal(actual, moe.moe_mlp(*args))


def test_rows_that_cannot_be_copied_in_bulk_are_refused():
    args = torch.zeros(5, 41), torch.zeros(5, 1), torch.zeros(5, 1, dtype=torch.int64)
    with pytest.raises(DayshiftError, match="41 and 24 must be multiples of 4"):
        moe.moe_mlp(*args, torch.zeros(2, 48, 41), torch.zeros(2, 41, 24))


def with_biases(*args: torch.Tensor, mixture: Any, activation: Activation) -> torch.Tensor:
    """For the interpreter's process: keyword arguments do not travel."""
    x, weights, expert_ids, gate_up, down, gate_up_bias, down_bias = args
    return mixture(
        x,
        weights,
        expert_ids,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
    )


@pytest.mark.parametrize(("mixture", "num_tokens"), [(FEW, 1), (TILED, 9)])
@pytest.mark.parametrize("activation", get_args(Activation))
def test_biases_and_activations(
    interpreter: ProcessPoolExecutor, num_tokens: int, activation: Activation, mixture: Any
):
    args = make_args(num_tokens, torch.float32)
    _, _, _, gate_up, down = args
    biases = randn(*gate_up.shape[:2], dtype=torch.float32), randn(*down.shape[:2], dtype=torch.float32)
    run = partial(with_biases, mixture=mixture, activation=activation)
    actual = interpreter.submit(run, *args, *biases).result(timeout=120)
    expected = reference.moe_mlp(*args, gate_up_bias=biases[0], down_bias=biases[1], activation=activation)
    assert_close(actual, expected)


@pytest.mark.parametrize(("mixture", "num_tokens"), [(FEW, 2), (TILED, 40)])
def test_every_token_picks_the_same_experts(launch: Launch, mixture: Any, num_tokens: int):
    """More picks of one expert than a tile holds."""
    x, weights, expert_ids, gate_up, down = make_args(num_tokens, torch.float32)
    expert_ids = expert_ids[:1].expand_as(expert_ids).contiguous()
    args = (x, weights, expert_ids, gate_up, down)
    assert_close(launch(mixture, *args), reference.moe_mlp(*args))


@pytest.mark.parametrize(("mixture", "num_tokens"), [(FEW, 2), (TILED, 5)])
def test_a_slice_of_a_wider_tensor(launch: Launch, mixture: Any, num_tokens: int):
    _, *rest = make_args(num_tokens, torch.float32)
    x = randn(num_tokens, 100, dtype=torch.float32)[:, 30:70]
    assert_close(launch(mixture, x, *rest), reference.moe_mlp(x, *rest))
