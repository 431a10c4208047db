"""Kernels over pools of int8 and fp8 keys and values against their twins, see `quant.kv`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dayshift.engine.kernels import attention, invariant, reference, rotary
from dayshift.engine.quant import kv
from tests.engine.test_kernels_decode_attention import attend_on, decodes
from tests.engine.test_kernels_triton import TOLERANCE, attention_case, cos_sin_table, randn
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch

Launch = Callable[..., Any]

both_kinds = pytest.mark.parametrize("kind", kv.POOL_DTYPES)


def quantized(pool: torch.Tensor, kind: str) -> torch.Tensor:
    """A pool of floats as one of quantised values, with scales that differ widely."""
    num_blocks, block_size, num_heads, head_dim = pool.shape
    bytes_shape = (num_blocks, block_size, num_heads, head_dim + kv.SCALE_BYTES)
    made = torch.zeros(bytes_shape, dtype=kv.POOL_DTYPES[kind])
    factors = randn(num_blocks * block_size, num_heads, 1, dtype=torch.float32, seed=9).clamp(-2, 0.3).exp()
    kv.write_slots(pool.flatten(0, 1).float() * factors, made, torch.arange(num_blocks * block_size))
    return made


def quantized_case(
    kind: str, heads: tuple[int, int, int], lens: list[tuple[int, int]], **options: Any
) -> list[Any]:
    q, k_pool, v_pool, *others = attention_case(heads, lens, **options)
    return [q, quantized(k_pool, kind), quantized(v_pool, kind), *others]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """As for pools of floats; in float32 the logarithms of scales, and what is made of them, cost a digit."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    tolerance = max(1e-5, TOLERANCE[actual.dtype])
    error = (actual.double() - expected.double()).abs().max()
    assert error <= tolerance * max(1.0, float(expected.abs().max()))


def skip_bfloat16(dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    if dtype == torch.bfloat16 and "interpreter" in request.node.name:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")


@both_kinds
@pytest.mark.parametrize(
    "lens",
    [
        pytest.param([(1, 1), (70, 1), (0, 1), (300, 1)], id="decodes"),
        pytest.param([(33, 5), (90, 1), (70, 70), (3, 0), (9, 2), (0, 1)], id="mixed"),
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
        pytest.param((32, 4, 128), 16, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param((7, 1, 96), 64, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    "op", [attention.paged_attention, invariant.paged_attention], ids=["fast", "invariant"]
)
def test_attention_equals_its_twin(
    launch: Launch,
    op: Callable[..., Any],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    lens: list[tuple[int, int]],
    kind: str,
    request: pytest.FixtureRequest,
):
    skip_bfloat16(dtype, request)
    case = quantized_case(kind, heads, lens, block_size=block_size, dtype=dtype)
    assert_close(launch(attend, op.__module__, *case), reference.paged_attention(*case))


def attend(module: str, *arguments: Any) -> torch.Tensor:
    """An op by its module's name: the interpreter's process takes it so, and the GPU then takes no other."""
    ops = {op.__module__: op for op in (attention.paged_attention, invariant.paged_attention)}
    return ops[module](*arguments)


@both_kinds
@pytest.mark.parametrize("window", [1, 40, 300])
@pytest.mark.parametrize("num_processors", [1, 3])
def test_decodes_with_sinks_wherever_they_are_cut(
    launch: Launch, kind: str, window: int, num_processors: int
):
    sinks = randn(4, dtype=torch.float32, seed=5) * 3
    case = quantized_case(kind, (4, 2, 16), decodes([700, 1, 0, 290, 64]), dtype=torch.float16)
    arguments: list[Any] = [*case, sinks.half(), window]
    assert_close(launch(attend_on, num_processors, *arguments), reference.paged_attention(*arguments))


@both_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 2, 8), (3, 1, 10), (6, 3, 64)])
@pytest.mark.parametrize("op", ["store_kv", "rope_store_kv", "norm_rope_store_kv"])
def test_what_is_stored_has_its_twins_bytes(
    launch: Launch,
    op: str,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    kind: str,
    request: pytest.FixtureRequest,
):
    if "interpreter" in request.node.name and (kind == "fp8" or op == "norm_rope_store_kv"):
        pytest.skip("Triton's interpreter rounds to fp8, and norms to bfloat16, wrongly")
    num_heads, num_kv_heads, head_dim = heads
    qkv = randn(5, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    qkv[2, num_heads:] = 0
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    pools = [quantized(randn(3, 4, num_kv_heads, head_dim, dtype=dtype, seed=seed), kind) for seed in (1, 2)]
    expected = [pool.clone() for pool in pools]
    norms: list[Any] = [randn(head_dim, dtype=dtype, seed=4), randn(head_dim, dtype=dtype, seed=5), 1e-5]
    place: list[Any] = [torch.tensor([3, 0, 9, 4, 1]), cos_sin_table(10, head_dim)]
    given = {"store_kv": [], "rope_store_kv": place, "norm_rope_store_kv": [*norms, *place]}[op]
    first = [k, v] if op == "store_kv" else [q, k, v]
    slots = torch.tensor([11, -1, 0, 5, 6])
    launch(getattr(rotary, op), *first, *given, *pools, slots)
    getattr(reference, op)(*first, *given, *expected, slots)
    for pool, twin in zip(pools, expected, strict=True):
        assert torch.equal(pool, twin)


@both_kinds
def test_a_query_does_not_depend_on_its_chunk_in_deterministic_mode(launch: Launch, kind: str):
    """Bit for bit: a chunk's queries at once, and in two chunks beside a decode."""
    q, k_pool, v_pool, tables, _, _, table, scale = quantized_case(kind, (4, 2, 16), [(560, 30), (70, 1)])

    def attend_chunks(rows: list[int], lens: list[int], queries: list[torch.Tensor]) -> torch.Tensor:
        starts = torch.tensor([0] + [len(query) for query in queries]).cumsum(0).int()
        arguments = (torch.cat(queries), k_pool, v_pool, tables[rows], torch.tensor(lens).int(), starts)
        return launch(attend, invariant.paged_attention.__module__, *arguments, table, scale)

    whole = attend_chunks([0], [560], [q[:30]])
    first = attend_chunks([1, 0], [70, 541], [q[30:], q[:11]])
    last = attend_chunks([0], [560], [q[11:30]])
    assert torch.equal(torch.cat((first[1:], last)), whole)
