"""The Triton kernels against their torch twins: under Triton's interpreter, and on a GPU if asked for."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from dayshift.engine import kernels
from dayshift.engine.kernels import activation, attention, norm, reference, rotary

# The interpreter truncates to bfloat16 instead of rounding, and multiplies bfloat16 matrices wrongly:
# attention in bfloat16 is tested on GPUs only.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(TOLERANCE)

Launch = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A process whose Triton interprets: it decides when Triton is imported, here it may be already.

    Tensors are shared with it, so what a kernel writes in place is seen here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
            assert executor.submit(os.getenv, "TRITON_INTERPRET").result() == "1"
            yield executor


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def launch(request: pytest.FixtureRequest) -> Launch:
    """`launch(kernel, *args)`: its result on the CPU; tensors written in place are brought back."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda kernel, *args: executor.submit(kernel, *args).result(timeout=120)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(kernel: Callable[..., Any], *args: Any) -> Any:
        on_device = [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args]
        result = getattr(kernels, kernel.__name__, kernel)(*on_device)
        for arg, moved in zip(args, on_device, strict=True):
            if isinstance(arg, torch.Tensor):
                arg.copy_(moved)
        if isinstance(result, tuple):
            return tuple(r.cpu() for r in result)
        return None if result is None else result.cpu()

    return on_gpu


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert actual.is_contiguous()
    if actual.numel():
        error = (actual.double() - expected.double()).abs().max()
        assert error <= TOLERANCE[actual.dtype] * max(1.0, float(expected.abs().max()))


def cos_sin_table(num_positions: int, head_dim: int) -> torch.Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(num_positions, dtype=torch.float64).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 50), (2, 2500), (37, 64), (5, 3, 24)])
def test_rms_norm(launch: Launch, shape: tuple[int, ...], dtype: torch.dtype):
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    residual = randn(*shape, dtype=dtype, seed=2)
    assert_close(launch(norm.rms_norm, x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    y, summed = launch(norm.rms_norm, x, weight, 1e-5, residual)
    expected_y, expected_sum = reference.rms_norm(x, weight, 1e-5, residual)
    assert_close(summed, expected_sum)
    assert_close(y, expected_y)


def test_rms_norm_of_a_view_of_packed_heads(launch: Launch):
    heads = randn(4, 5 * 8, dtype=torch.float32)[:, 8:32].unflatten(1, (3, 8))
    weight = randn(8, dtype=torch.float32, seed=1)
    assert_close(launch(norm.rms_norm, heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 2), (1, 2), (3, 22), (2, 2600)])
def test_silu_mul(launch: Launch, shape: tuple[int, int], dtype: torch.dtype):
    gate_up = 4 * randn(*shape, dtype=dtype)
    assert_close(launch(activation.silu_mul, gate_up), reference.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_gated_activation(launch: Launch, kind: Any, dtype: torch.dtype):
    gate_up = 4 * randn(3, 2600, dtype=dtype)
    assert_close(
        launch(activation.gated_activation, gate_up, kind), reference.gated_activation(gate_up, kind)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 2), (7, 3, 10), (4, 6, 64), (0, 2, 8)])
def test_rope(launch: Launch, shape: tuple[int, int, int], dtype: torch.dtype):
    packed = randn(shape[0], shape[1] + 2, shape[2], dtype=dtype)
    x, positions = packed[:, 1:-1], torch.arange(shape[0]) * 13
    table = cos_sin_table(100, shape[2])
    assert_close(launch(rotary.rope, x, positions, table), reference.rope(x, positions, table))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 8), (3, 1, 10), (6, 3, 64)])
@pytest.mark.parametrize("is_fused", [True, False])
def test_store_kv(launch: Launch, heads: tuple[int, int, int], dtype: torch.dtype, is_fused: bool):
    num_heads, num_kv_heads, head_dim = heads
    qkv = randn(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    pools = [randn(3, 4, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2)]
    expected_pools = [pool.clone() for pool in pools]
    positions, table = torch.tensor([3, 0, 9, 4, 1]), cos_sin_table(10, head_dim)
    slots = torch.tensor([11, -1, 0, 5, 6])
    if is_fused:
        rotated = launch(rotary.rope_store_kv, q, k, v, positions, table, *pools, slots)
        assert_close(rotated, reference.rope(q, positions, table))
    else:
        launch(rotary.store_kv, k, v, *pools, slots)
    reference.store_kv(k, v, expected_pools[0], expected_pools[1], slots)
    for pool, expected in zip(pools, expected_pools, strict=True):
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (5, 1, 24), (3, 3, 128)])
def test_norm_rope_store_kv(launch: Launch, heads: tuple[int, int, int], dtype: torch.dtype):
    num_heads, num_kv_heads, head_dim = heads
    row = randn(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=3)  # as one projection gives it
    q, k, v = row.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    norms = [randn(head_dim, dtype=dtype, seed=seed) for seed in (4, 5)]
    pools = [randn(4, 4, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (6, 7)]
    expected_pools = [pool.clone() for pool in pools]
    slots = torch.tensor([11, -1, 0, 5, 6])
    args: list[Any] = [q, k, v, *norms, 1e-5, torch.tensor([3, 0, 9, 4, 1]), cos_sin_table(10, head_dim)]
    rotated = launch(rotary.norm_rope_store_kv, *args, *pools, slots)
    args += [*expected_pools, slots]
    assert_close(rotated, reference.norm_rope_store_kv(*args))
    for pool, expected in zip(pools, expected_pools, strict=True):
        assert_close(pool, expected)


def attention_case(
    heads: tuple[int, int, int],
    lens: list[tuple[int, int]],
    *,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """Arguments of paged_attention for sequences of (seq_len, num_queries), blocks in random order."""
    num_heads, num_kv_heads, head_dim = heads
    blocks_per_sequence = max(-(-seq_len // block_size) for seq_len, _ in lens) + 1
    num_blocks = blocks_per_sequence * len(lens)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).int()
    query_start = torch.tensor([0] + [n for _, n in lens]).cumsum(0).int()
    return (
        randn(int(query_start[-1]), num_heads, head_dim, dtype=dtype, seed=1),
        randn(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, seed=2),
        randn(num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, seed=3),
        order.view(len(lens), -1),
        torch.tensor([seq_len for seq_len, _ in lens]).int(),
        query_start,
        cos_sin_table(blocks_per_sequence * block_size, head_dim),
        head_dim**-0.5,
    )


@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1), (70, 1), (0, 1), (1100, 1)], id="decodes with padding, the last long"),
        pytest.param([(40, 40)], id="one prefill"),
        pytest.param([(33, 5), (90, 1), (70, 70), (3, 0), (9, 2), (0, 1)], id="mixed"),
        pytest.param([(150, 130)], id="chunk over several tiles"),
        pytest.param([(0, 2), (5, 3)], id="prefill with padding"),
        pytest.param([(700, 40), (30, 1)], id="short chunk over three splits"),
    ],
)
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        ((4, 4, 16), 16, torch.float32),
        ((6, 2, 64), 16, torch.float16),
        ((5, 1, 10), 5, torch.float32),
        pytest.param((32, 8, 128), 16, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((7, 1, 96), 64, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_paged_attention(
    launch: Launch,
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    lens: list[tuple[int, int]],
    request: pytest.FixtureRequest,
):
    if dtype == torch.bfloat16 and "interpreter" in request.node.name:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    arguments = attention_case(heads, lens, block_size=block_size, dtype=dtype)
    assert_close(launch(attention.paged_attention, *arguments), reference.paged_attention(*arguments))


@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1), (70, 1), (0, 1), (1100, 1)], id="decodes"),
        pytest.param([(150, 130), (0, 2), (90, 1), (1060, 3)], id="mixed"),
    ],
)
@pytest.mark.parametrize("has_sinks", [True, False])
@pytest.mark.parametrize("window", [None, 1, 40, 600])
def test_attention_with_sinks_and_windows(
    launch: Launch, window: int | None, has_sinks: bool, lens: list[tuple[int, int]]
):
    sinks = randn(6, dtype=torch.float32, seed=5) * 3 if has_sinks else None
    arguments: list[Any] = [*attention_case((6, 2, 16), lens), sinks, window]
    assert_close(launch(attention.paged_attention, *arguments), reference.paged_attention(*arguments))


def test_keys_rotate_by_a_scaled_table(launch: Launch):
    """Tables of YaRN carry a factor, which a sum of two angles must not carry twice."""
    q, *pool_and_lens, table, scale = attention_case((4, 2, 16), [(70, 1), (90, 40)])
    arguments: list[Any] = [q, *pool_and_lens, table * 1.3, scale]
    assert_close(launch(attention.paged_attention, *arguments), reference.paged_attention(*arguments))


def test_long_beside_short(launch: Launch):
    arguments = attention_case((2, 1, 16), [(8300, 1), (40, 1)], block_size=64)
    assert_close(launch(attention.paged_attention, *arguments), reference.paged_attention(*arguments))


def test_attention_reads_strided_queries(launch: Launch):
    q, *others = attention_case((4, 2, 16), [(20, 20), (30, 1)])
    packed = torch.cat((q, q), dim=1)[:, 4:]
    assert not packed.is_contiguous()
    assert_close(launch(attention.paged_attention, packed, *others), reference.paged_attention(q, *others))


@pytest.mark.parametrize(("window", "past"), [(None, 0), (48, 0), (None, 260)])
def test_a_sequence_does_not_depend_on_its_neighbours(launch: Launch, window: int | None, past: int):
    """Bit for bit: a decode beside a long prefill, and a prefill in two chunks, give what they give alone;
    with a past, the chunks' keys are in splits."""
    lens = [(600, 1), (past + 60, 60)]
    q, k_pool, v_pool, tables, _, _, table, scale = attention_case((4, 2, 16), lens)
    paged_attention = attention.paged_attention

    def attend(rows: list[int], seq_lens: list[int], queries: list[torch.Tensor]) -> torch.Tensor:
        starts = torch.tensor([0] + [len(query) for query in queries]).cumsum(0).int()
        lens = torch.tensor(seq_lens).int()
        return launch(
            paged_attention,
            torch.cat(queries),
            k_pool,
            v_pool,
            tables[rows],
            lens,
            starts,
            table,
            scale,
            None,
            window,
        )

    decode, prefill = q[:1], q[1:]
    together = attend([0, 1], [600, past + 60], [decode, prefill])
    assert torch.equal(together[:1], attend([0], [600], [decode]))
    assert torch.equal(together[1:], attend([1], [past + 60], [prefill]))
    chunks = [attend([1], [past + 23], [prefill[:23]]), attend([1], [past + 60], [prefill[23:]])]
    assert torch.equal(together[1:], torch.cat(chunks))


def test_pools_that_are_not_contiguous_are_refused():
    q, k_pool, *others = attention_case((2, 1, 16), [(4, 4)])
    with pytest.raises(ValueError, match="contiguous"):
        attention.paged_attention(q, k_pool.transpose(0, 1), *others)
