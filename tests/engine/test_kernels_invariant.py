"""Batch-invariant kernels: what they compute is right, and a token's result has the same bits whatever is
computed beside it."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.engine.kernels import invariant, reference
from tests.engine.test_kernels_triton import assert_close, attention_case, randn
from tests.engine.test_kernels_triton import interpreter as interpreter

Launch = Callable[..., Any]
FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def launch(request: pytest.FixtureRequest) -> Launch:
    """`launch(kernel, *args)`: its result on the CPU, of this kernel and no other."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda kernel, *args: executor.submit(kernel, *args).result(timeout=120)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(kernel: Callable[..., Any], *args: Any) -> Any:
        result = kernel(*(arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args))
        return tuple(r.cpu() for r in result) if isinstance(result, tuple) else result.cpu()

    return on_gpu


def experts(x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor, *more: Any) -> torch.Tensor:
    """`moe_mlp`, its options by place: the interpreter's process takes no others."""
    gate_up, down, gate_up_bias, down_bias = more
    return invariant.moe_mlp(
        x, weights, expert_ids, gate_up, down, gate_up_bias=gate_up_bias, down_bias=down_bias
    )


def rows_of(values: Any, rows: list[int]) -> Any:
    return tuple(v[rows] for v in values) if isinstance(values, tuple) else values[rows]


def assert_equal(actual: Any, expected: Any) -> None:
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (actual, expected)), strict=True):
        assert torch.equal(a, b)


# --- products and experts: (op, its arguments by token, its other arguments) ------------------------


def linear_case(num_tokens: int) -> tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...]]:
    weight, bias = randn(70, 200, dtype=torch.float32, seed=7), randn(70, dtype=torch.float32, seed=8)
    return invariant.linear, (randn(num_tokens, 200, dtype=torch.float32),), (weight, bias)


def norm_gated_linear_case(num_tokens: int) -> tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...]]:
    x, residual = (randn(num_tokens, 72, dtype=torch.float32, seed=seed) for seed in (0, 1))
    norm, weight = randn(72, dtype=torch.float32, seed=2), randn(80, 72, dtype=torch.float32, seed=3) / 8
    return invariant.norm_gated_linear, (x, residual), (norm, 1e-5, weight)


def norm_router_case(num_tokens: int) -> tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...]]:
    x, residual = (randn(num_tokens, 48, dtype=torch.float32, seed=seed) for seed in (0, 1))
    norm, weight = randn(48, dtype=torch.float32, seed=2), randn(9, 48, dtype=torch.float32, seed=3) / 7
    return invariant.norm_router, (x, residual), (norm, 1e-5, weight)


def experts_case(
    num_tokens: int,
    hidden: int = 48,
    inner: int = 20,
    num_experts: int = 6,
    num_picked: int = 3,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, tuple[torch.Tensor, ...], tuple[Any, ...]]:
    gate_up = randn(num_experts, 2 * inner, hidden, dtype=dtype, seed=1) / hidden**0.5
    down = randn(num_experts, hidden, inner, dtype=dtype, seed=2) / inner**0.5
    scores = randn(num_tokens, num_experts, dtype=torch.float32, seed=3)
    weights, expert_ids = reference.route_top_k(scores, num_picked, True)
    return experts, (randn(num_tokens, hidden, dtype=dtype), weights, expert_ids), (gate_up, down, None, None)


CASES = [linear_case, norm_gated_linear_case, norm_router_case, experts_case]


@pytest.mark.parametrize("make", CASES)
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_products_equal_their_twins(launch: Launch, make: Any, num_tokens: int):
    op, by_token, others = make(num_tokens)
    if op is experts:
        x, weights, expert_ids = by_token
        gate_up, down, *_ = others
        expected: Any = reference.moe_mlp(x, weights, expert_ids, gate_up, down)
    else:
        name = "linear" if make is linear_case else op.__name__
        expected = getattr(reference, name)(*by_token, *others)
    actual = launch(op, *by_token, *others)
    for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (actual, expected)), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("make", CASES)
@FEW
@given(rows=st.lists(st.integers(0, 69), min_size=1, max_size=70, unique=True))
def test_a_token_does_not_depend_on_those_beside_it(launch: Launch, make: Any, rows: list[int]):
    """Bit for bit, in any company and order."""
    op, by_token, others = make(70)
    together = launch(op, *by_token, *others)
    some = launch(op, *(values[rows] for values in by_token), *others)
    assert_equal(some, rows_of(together, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, 33, 100])
def test_in_bfloat16_at_the_size_of_a_model(launch: Launch, num_tokens: int):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = randn(200, 4096, dtype=torch.bfloat16).cuda()
    weight = (randn(4096, 4096, dtype=torch.bfloat16, seed=1) / 64).cuda()
    together = invariant.linear(x, weight)
    assert torch.equal(invariant.linear(x[50 : 50 + num_tokens], weight), together[50 : 50 + num_tokens])
    assert_close(together.cpu(), reference.linear(x, weight).cpu())
    _, by_token, others = experts_case(200, 1024, 768, 16, 4, torch.bfloat16)
    by_token, others = [value.cuda() for value in by_token], [value.cuda() for value in others[:2]]
    mixed = invariant.moe_mlp(*by_token, *others)
    some = invariant.moe_mlp(*(values[50 : 50 + num_tokens] for values in by_token), *others)
    assert torch.equal(some, mixed[50 : 50 + num_tokens])


# --- attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1), (70, 1), (0, 1), (600, 1)], id="decodes with padding, over two splits"),
        pytest.param([(33, 5), (0, 2), (70, 70), (3, 0), (9, 2), (540, 1)], id="mixed"),
    ],
)
@pytest.mark.parametrize(
    ("heads", "dtype", "has_sinks", "window"),
    [
        ((4, 2, 16), torch.float32, False, None),
        ((4, 2, 16), torch.float32, True, 40),
        ((4, 2, 16), torch.float32, False, 1),
        ((5, 1, 10), torch.float16, True, 520),
        pytest.param((32, 8, 128), torch.bfloat16, True, None, marks=pytest.mark.gpu),
        pytest.param((64, 8, 64), torch.bfloat16, True, 128, marks=pytest.mark.gpu),
    ],
)
def test_attention_equals_its_twin(
    launch: Launch,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    lens: list[tuple[int, int]],
    has_sinks: bool,
    window: int | None,
    request: pytest.FixtureRequest,
):
    if dtype == torch.bfloat16 and "interpreter" in request.node.name:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    sinks = randn(heads[0], dtype=torch.float32, seed=5) * 3 if has_sinks else None
    arguments: list[Any] = [*attention_case(heads, lens, dtype=dtype), sinks, window]
    assert_close(launch(invariant.paged_attention, *arguments), reference.paged_attention(*arguments))


def test_more_queries_than_one_launch_holds(launch: Launch, monkeypatch: pytest.MonkeyPatch):
    arguments = attention_case((4, 2, 16), [(33, 5), (20, 20), (3, 0), (540, 2)])
    whole = launch(invariant.paged_attention, *arguments)
    assert torch.equal(launch(attend_in_small_launches, *arguments), whole)


def attend_in_small_launches(*arguments: Any) -> torch.Tensor:
    from dayshift.engine.kernels import invariant_attention

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariant_attention, "_MAX_PARTIAL_BYTES", 7 * 4 * 2 * 17 * 4)  # seven queries
        return invariant_attention.paged_attention(*arguments)


@pytest.mark.parametrize("window", [None, 48])
@FEW
@given(data=st.data())
def test_a_query_does_not_depend_on_its_chunk(launch: Launch, window: int | None, data: st.DataObject):
    """Bit for bit: two sequences, each cut into chunks anywhere, computed beside each other or alone."""
    lens = [(560, 30), (70, 70)]
    q, k_pool, v_pool, tables, _, _, table, scale = attention_case((4, 2, 16), lens)

    def attend(chunks: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """The outputs of chunks (sequence, first query, end)."""
        before = [0, lens[0][1]]
        queries = [q[before[s] + first : before[s] + end] for s, first, end in chunks]
        starts = torch.tensor([0] + [len(query) for query in queries]).cumsum(0).int()
        seq_lens = torch.tensor([lens[s][0] - lens[s][1] + end for s, _, end in chunks]).int()
        rows = tables[[s for s, _, _ in chunks]]
        args = (torch.cat(queries), k_pool, v_pool, rows, seq_lens, starts, table, scale, None, window)
        return list(launch(invariant.paged_attention, *args).split([len(query) for query in queries]))

    whole = attend([(0, 0, 30), (1, 0, 70)])
    chunks: list[tuple[int, int, int]] = []
    for s, (_, n) in enumerate(lens):
        first, end = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))
        chunks.append((s, first, end))
    chunks = data.draw(st.permutations(chunks))[: data.draw(st.integers(1, 2))]
    for (s, first, end), part in zip(chunks, attend(chunks), strict=True):
        assert torch.equal(part, whole[s][first:end])
