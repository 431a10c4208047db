"""Each kernel by itself on CUDA: time, bytes or operations a second, and the share of this GPU's ceiling.

The ceilings are measured in the same run: reading (a Triton kernel over 4 GiB) and multiplying (cuBLAS,
bfloat16, 8192³). A kernel is replayed in a CUDA graph over so many copies of its weights that the
cache holds none of them.
"""

# A launch takes options that the kernel's parameters do not name.
# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dayshift.engine import kernels
from dayshift.engine.kernels import moe
from dayshift.engine.quant.kv import POOL_DTYPES, SCALE_BYTES, write_slots

_CACHE_BYTES = 256 << 20  # more than any GPU's last cache
_BLOCK_SIZE = 16
_LEAST_LAUNCHES = 8  # of a graph, beside which its own launch is small


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One kernel's line. `rate` is TB/s where `unit` is "TB/s", else TFLOP/s."""

    name: str
    microseconds: float
    rate: float
    unit: str
    share: float  # of the ceiling


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kernel to time: `make()` returns launches over distinct memory, each of `work` bytes read and
    written, or floating-point operations."""

    name: str
    work: float
    is_bound_by_memory: bool
    make: Callable[[], list[Callable[[], object]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the kernels of a decoder depend on."""

    hidden: int
    qkv: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_experts: int = 0
    num_picked: int = 0


SHAPES = {
    "llama-3.1-8b": Shape(
        hidden=4096, qkv=6144, inner=14336, num_heads=32, num_kv_heads=8, head_dim=128, vocab=128256
    ),
    "qwen3-30b-a3b": Shape(
        hidden=2048,
        qkv=5120,
        inner=768,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab=151936,
        num_experts=128,
        num_picked=8,
    ),
}


def measure_kernels(cases: Iterable[Case], only: str = "") -> Iterator[KernelRow]:
    """Rows of the ceilings and of every case whose name contains `only`."""
    multiply = Case(name="ceiling: multiply", work=2 * 8192**3, is_bound_by_memory=False, make=_make_multiply)
    ceilings: dict[bool, float] = {}
    for case in (_READ, multiply):
        seconds = time_launches(case.make())
        ceilings[case.is_bound_by_memory] = case.work / seconds
        yield _row(case, seconds, ceilings)
    for case in cases:
        if only in case.name:
            yield _row(case, time_launches(case.make()), ceilings)


def read_bandwidth() -> float:
    """Bytes a second that a kernel gets which does nothing but read."""
    return _READ.work / time_launches(_READ.make())


def _row(case: Case, seconds: float, ceilings: dict[bool, float]) -> KernelRow:
    rate = case.work / seconds
    return KernelRow(
        name=case.name,
        microseconds=seconds * 1e6,
        rate=rate / 1e12,
        unit="TB/s" if case.is_bound_by_memory else "TFLOP/s",
        share=rate / ceilings[case.is_bound_by_memory],
    )


def time_launches(launches: list[Callable[[], object]], repeats: int = 5) -> float:
    """Seconds of one launch: the median of `repeats` replays of a graph of all of them."""
    for launch in launches[:2]:
        launch()
    launches = launches * -(-_LEAST_LAUNCHES // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times: list[float] = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(launches))
    return sorted(times[1:])[repeats // 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """The ops of linear layers, and what their cases are called."""

    suffix: str
    linear: Callable[..., object]
    norm_linear: Callable[..., object]
    norm_gated_linear: Callable[..., object]


OURS = Dense(
    suffix="",
    linear=kernels.linear,
    norm_linear=kernels.norm_linear,
    norm_gated_linear=kernels.norm_gated_linear,
)


def _cublas_norm_linear(x: Tensor, residual: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    return F.linear(kernels.rms_norm(x, norm, eps, residual)[0], weight)


def _cublas_norm_gated_linear(*args: Any) -> Tensor:
    return kernels.gated_activation(_cublas_norm_linear(*args), "silu")


CUBLAS = Dense(
    suffix=", cuBLAS",
    linear=F.linear,
    norm_linear=_cublas_norm_linear,
    norm_gated_linear=_cublas_norm_gated_linear,
)


def decoder_cases(shape: Shape) -> Iterator[Case]:
    """The kernels of a decode step and of a prefill, at the sizes of the shape."""
    for num_tokens in (1, 8, 16, 32, 64, 100):
        for dense in (OURS, CUBLAS):
            yield from _dense_cases(shape, num_tokens, dense)
    yield _linear("head, 1 token", 1, shape.hidden, shape.vocab, OURS)
    if shape.num_experts:
        for num_tokens in (1, 8, 16, 100):
            yield _router(shape, num_tokens)
        for num_tokens in (1, 8, 32, 100):
            yield _mixture(shape, num_tokens)
        for num_tokens in (1, 4, 8, 32, 100, 133, 300, 590, 2340, 8892):
            yield _experts(shape, num_tokens, moe.moe_mlp)
            if num_tokens > 100:
                yield _experts(shape, num_tokens, _grouped_experts, ", grouped_mm")
    for num_rows in (1, 8, 32):
        yield _draw(shape, num_rows)
    for batch, context in ((1, 133), (1, 8000), (8, 2048), (32, 2048), (100, 2048)):
        for kv_cache_dtype in ("auto", *POOL_DTYPES):
            yield _decode_attention(shape, batch, context, kv_cache_dtype)
    for num_tokens, context in ((8, 8192), (102, 8192), (512, 2048), (512, 8192), (2340, 2340)):
        for kv_cache_dtype in ("auto", *POOL_DTYPES):
            yield _chunk_attention(shape, num_tokens, context, kv_cache_dtype)
    for length in (2340, 8892, 26926):
        yield _prompt_attention(shape, length)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02


def _num_copies(num_bytes: int) -> int:
    return max(2, min(64, _CACHE_BYTES // num_bytes + 1))


def _dense_cases(shape: Shape, num_tokens: int, dense: Dense) -> Iterator[Case]:
    """Each product of a layer, with the norm in front of it and the activation behind, and all of them in
    a row: there the launches overlap as in a step."""
    sizes = [
        ("norm + qkv", shape.hidden, shape.qkv, "norm"),
        ("o", shape.num_heads * shape.head_dim, shape.hidden, "plain"),
    ]
    if not shape.num_experts:
        sizes += [
            ("norm + gate/up + silu", shape.hidden, shape.inner, "gated"),
            ("down", shape.inner, shape.hidden, "plain"),
        ]
    cases = [
        _linear(f"{name}, {num_tokens} tokens{dense.suffix}", num_tokens, size, num_rows, dense, kind)
        for name, size, num_rows, kind in sizes
    ]
    yield from cases

    def make() -> list[Callable[[], object]]:
        launches = [case.make()[:8] for case in cases]
        return [partial(_call_all, layer) for layer in zip(*launches, strict=False)]

    yield Case(
        name=f"all products of a layer, {num_tokens} tokens{dense.suffix}",
        work=sum(case.work for case in cases),
        is_bound_by_memory=True,
        make=make,
    )


def _call_all(launches: Iterable[Callable[[], object]]) -> None:
    for launch in launches:
        launch()


def _linear(name: str, num_tokens: int, size: int, num_rows: int, dense: Dense, kind: str = "plain") -> Case:
    rows = 2 * num_rows if kind == "gated" else num_rows

    def make() -> list[Callable[[], object]]:
        x, norm = _randn(num_tokens, size), torch.ones(size, device="cuda")  # float32, as models have it
        weights = [_randn(rows, size) for _ in range(_num_copies(2 * rows * size))]
        if kind == "plain":
            return [partial(dense.linear, x, weight) for weight in weights]
        op = dense.norm_linear if kind == "norm" else dense.norm_gated_linear
        return [partial(op, x, x, norm, 1e-6, weight) for weight in weights]

    return Case(name=name, work=2 * rows * size, is_bound_by_memory=True, make=make)


def _router(shape: Shape, num_tokens: int) -> Case:
    """From the attention's output to the picked experts."""

    def make() -> list[Callable[[], object]]:
        x, norm = _randn(num_tokens, shape.hidden), torch.ones(shape.hidden, device="cuda")

        def route(router: Tensor) -> None:
            _, logits, _ = kernels.norm_router(x, x, norm, 1e-6, router)
            kernels.route_top_k(logits, shape.num_picked, True)

        return [partial(route, _randn(shape.num_experts, shape.hidden)) for _ in range(64)]

    work = 2 * shape.num_experts * shape.hidden
    return Case(
        name=f"norm + router + picks, {num_tokens} tokens", work=work, is_bound_by_memory=True, make=make
    )


def _mixture(shape: Shape, num_tokens: int) -> Case:
    """From the attention's output to the experts' sum; of as many experts as random picks hit on average."""
    num_experts, hidden, inner = shape.num_experts, shape.hidden, shape.inner
    num_read = num_experts * (1 - (1 - shape.num_picked / num_experts) ** num_tokens)

    def make() -> list[Callable[[], object]]:
        x = 50 * _randn(num_tokens, hidden)
        norm = torch.ones(hidden, device="cuda")
        weights = [
            (
                _randn(num_experts, hidden),
                _randn(num_experts, 2 * inner, hidden),
                _randn(num_experts, hidden, inner),
            )
            for _ in range(4)
        ]
        return [
            partial(kernels.norm_moe, x, x, norm, 1e-6, *of_layer, shape.num_picked, True)
            for of_layer in weights
        ]

    work = round(2 * hidden * (num_experts + num_read * 3 * inner))
    name = f"norm + router + picks + experts, {num_tokens} tokens"
    return Case(name=name, work=work, is_bound_by_memory=True, make=make)


def _draw(shape: Shape, num_rows: int) -> Case:
    """A token for each row at temperature 1."""

    def make() -> list[Callable[[], object]]:
        temperatures, keys = torch.ones(num_rows, device="cuda"), torch.arange(num_rows, device="cuda")
        return [
            partial(
                kernels.draw_by_race, torch.randn(num_rows, shape.vocab, device="cuda"), temperatures, keys
            )
            for _ in range(_num_copies(4 * num_rows * shape.vocab))
        ]

    work = 4 * num_rows * shape.vocab
    return Case(name=f"draw, {num_rows} rows", work=work, is_bound_by_memory=True, make=make)


def _grouped_experts(x: Tensor, weights: Tensor, expert_ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The mixture by torch's grouped product, with the sorting and gathering that it needs."""
    by_expert, order = expert_ids.flatten().sort(stable=True)
    experts = torch.arange(len(down), device=x.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    gathered = x[order // expert_ids.shape[1]]
    inner = kernels.silu_mul(F.grouped_mm(gathered, gate_up.transpose(1, 2), offs=ends))
    out = torch.empty(len(order), x.shape[1], dtype=x.dtype, device=x.device)
    out[order] = F.grouped_mm(inner, down.transpose(1, 2), offs=ends)
    return (out.view(*expert_ids.shape, -1).float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _experts(shape: Shape, num_tokens: int, mixture: Callable[..., object], suffix: str = "") -> Case:
    generator = torch.Generator().manual_seed(num_tokens)
    picked = torch.stack(
        [
            torch.randperm(shape.num_experts, generator=generator)[: shape.num_picked]
            for _ in range(num_tokens)
        ]
    )
    num_read = len(picked.unique())
    bytes_of_expert = 2 * 3 * shape.hidden * shape.inner  # and as many operations for each token of it

    def make() -> list[Callable[[], object]]:
        x, expert_ids = _randn(num_tokens, shape.hidden), picked.cuda()
        weights = torch.full(picked.shape, 1 / shape.num_picked, device="cuda")
        copies = _num_copies(num_read * bytes_of_expert)
        experts = [
            (
                _randn(shape.num_experts, 2 * shape.inner, shape.hidden),
                _randn(shape.num_experts, shape.hidden, shape.inner),
            )
            for _ in range(min(copies, 8))
        ]
        return [partial(mixture, x, weights, expert_ids, *pair) for pair in experts]

    is_bound_by_memory = num_tokens * shape.num_picked < 100 * shape.num_experts
    return Case(
        name=f"experts, {num_tokens} tokens, {num_read} experts{suffix}",
        work=bytes_of_expert * (num_read if is_bound_by_memory else num_tokens * shape.num_picked),
        is_bound_by_memory=is_bound_by_memory,
        make=make,
    )


def _decode_attention(shape: Shape, batch: int, context: int, kv_cache_dtype: str) -> Case:
    bytes_read = 2 * batch * context * shape.num_kv_heads * _row_bytes(shape, kv_cache_dtype)

    return Case(
        name=f"decode attention, batch {batch}, context {context}{_suffix(kv_cache_dtype)}",
        work=bytes_read,
        is_bound_by_memory=True,
        make=partial(_paged_attention, shape, batch, 1, context, _num_copies(bytes_read), kv_cache_dtype),
    )


def _chunk_attention(shape: Shape, num_tokens: int, context: int, kv_cache_dtype: str) -> Case:
    num_pairs = num_tokens * (context - num_tokens) + num_tokens**2 // 2  # of a query and a key that it sees
    return Case(
        name=f"chunk attention, last {num_tokens} tokens of {context}{_suffix(kv_cache_dtype)}",
        work=4 * num_pairs * shape.num_heads * shape.head_dim,
        is_bound_by_memory=False,
        make=partial(_paged_attention, shape, 1, num_tokens, context, 2, kv_cache_dtype),
    )


def _paged_attention(
    shape: Shape, batch: int, num_queries: int, context: int, num_copies: int, kv_cache_dtype: str
) -> list[Callable[[], object]]:
    """The last `num_queries` tokens of each sequence, over copies of a pool whose blocks lie anyhow."""
    num_blocks = -(-context // _BLOCK_SIZE)
    q = _randn(batch * num_queries, shape.num_heads, shape.head_dim)
    tables = torch.randperm(batch * num_blocks, device="cuda").int().view(batch, num_blocks)
    lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * num_queries
    cos_sin, scale = _position_table(context, shape.head_dim), shape.head_dim**-0.5
    pools = [[_pool(shape, batch * num_blocks, kv_cache_dtype) for _ in range(2)] for _ in range(num_copies)]
    return [
        partial(kernels.paged_attention, q, *pool, tables, lens, starts, cos_sin, scale) for pool in pools
    ]


def _row_bytes(shape: Shape, kv_cache_dtype: str) -> int:
    return 2 * shape.head_dim if kv_cache_dtype == "auto" else shape.head_dim + SCALE_BYTES


def _suffix(kv_cache_dtype: str) -> str:
    return "" if kv_cache_dtype == "auto" else f", {kv_cache_dtype}"


def _pool(shape: Shape, num_blocks: int, kv_cache_dtype: str) -> Tensor:
    values = _randn(num_blocks, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    if kv_cache_dtype == "auto":
        return values
    row_shape = (*values.shape[:-1], _row_bytes(shape, kv_cache_dtype))
    pool = torch.zeros(row_shape, dtype=POOL_DTYPES[kv_cache_dtype], device="cuda")
    write_slots(values.flatten(0, 1), pool, torch.arange(num_blocks * _BLOCK_SIZE, device="cuda"))
    return pool


def _position_table(num_positions: int, head_dim: int) -> Tensor:
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(num_positions)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).cuda()


def _prompt_attention(shape: Shape, length: int) -> Case:
    def make() -> list[Callable[[], object]]:
        q = _randn(length, shape.num_heads, shape.head_dim)
        k, v = (_randn(length, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        return [partial(kernels.prompt_attention, q, k, v, (length,), shape.head_dim**-0.5)] * 2

    return Case(
        name=f"prompt attention, {length} tokens",
        work=2 * length * length * shape.num_heads * shape.head_dim,  # causal: half of 4 L² H D
        is_bound_by_memory=False,
        make=make,
    )


def _make_read() -> list[Callable[[], object]]:
    data = torch.zeros(1 << 30, dtype=torch.int32, device="cuda")
    out = torch.zeros(4096, dtype=torch.int32, device="cuda")
    return [lambda: _read[(4096,)](data, out, data.numel() // 4096, BLOCK=4096, num_warps=8)] * 2


_READ = Case(name="ceiling: read", work=4 << 30, is_bound_by_memory=True, make=_make_read)


def _make_multiply() -> list[Callable[[], object]]:
    a, b = _randn(8192, 8192), _randn(8192, 8192)
    return [lambda: a @ b] * 4


@triton.jit
def _read(data_ptr, out_ptr, length, BLOCK: tl.constexpr):  # noqa: N803
    first = tl.program_id(0).to(tl.int64) * length
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, length, BLOCK):
        total += tl.load(data_ptr + first + start + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))
