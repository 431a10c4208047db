"""A mixture of experts of one token, its norm and router in front, in one launch.

Each of these is short beside a hand-over between two launches: the norm and the router, the picks, gate and
up, down. Here one program for each processor goes through all of them. It computes one expert's logit, waits
for those of the others, picks by itself, and from then on reads without a pause: its share of the picked
experts' rows flows by bulk copies into a ring in shared memory, down's behind those of the gate and up. Of
down as much arrives as fits while the programs wait for each other's share of what is inside the experts.

All programs run at once, as those who wait for each other must: what comes behind begins only when each of
them has a processor. Two such launches at once could wait for each other for ever: of the engines of a
process that share a GPU, one may compute at a time, and where processes may share its processors (CUDA's
multi-process service) nothing is computed this way. Written in CUDA C++ (`cuda_source`), for GPUs of
capability 9.0 and more. `reference.norm_moe` specifies it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from dayshift.engine.kernels.cuda_source import CudaKernel, cuda_kernel
from dayshift.engine.kernels.launch import (
    may_share_processors,
    num_processors,
    overlap_options,
    shared_memory_bytes,
)
from dayshift.engine.models.config import Activation

_WARP, _WARPS = 32, 8  # threads of a warp, and warps that multiply
_STAGE_BYTES = 24_576
_FLIGHT_BYTES = 73_728  # on their way at once
_MOST_EXPERTS = 128  # whose logits one program each computes
_MOST_COLUMNS, _MOST_INNER = 4096, 2048  # of a row: what a warp's registers hold
_CHUNK = 256  # columns that a warp reads at once
_EPOCH_WORDS = 4  # of which one is used
_KINDS: dict[Activation, int] = {"silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a mixture."""

    columns: int  # of the token
    inner: int  # of an expert
    num_experts: int
    num_picked: int


@dataclass(frozen=True, slots=True)
class Ring:
    """How a program's rows pass through its shared memory; see `one_token_experts.cu`."""

    pairs: int  # rows of the gate, and as many of up, that arrive together
    rows: int  # of down that do
    slots: int
    flight: int  # stages on their way at once
    most_pairs: int  # of a program, in whole stages
    most_rows: int
    shared_bytes: int


def can_mix(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_picked: int,
    router_bias: torch.Tensor | None = None,
) -> bool:
    """`mix` can do it. Its experts have no biases."""
    narrow = [x, residual, router, gate_up, down, *([] if router_bias is None else [router_bias])]
    return (
        len(x) == 1
        and overlap_options(x.device)["OVERLAPS"]
        and not may_share_processors()
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.dtype == x.dtype for tensor in narrow)
        and norm_weight.dtype == torch.float32
        and all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in [*narrow, norm_weight])
        and _ring(x.device, _sizes(gate_up, num_picked)) is not None
    )


def mix(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_picked: int,
    is_normalized: bool,
    *,
    router_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `reference.norm_moe`, for what `can_mix`."""
    sizes = _sizes(gate_up, num_picked)
    ring = _ring(x.device, sizes)
    assert ring is not None
    y, summed = torch.empty_like(x), torch.empty_like(x)
    kernel(sizes, ring, router_bias is not None, is_normalized, activation, x.dtype).launch(
        num_processors(x.device),
        (_WARPS + 1) * _WARP,
        x,
        residual,
        norm_weight,
        router,
        x if router_bias is None else router_bias,
        gate_up,
        down,
        y,
        summed,
        _handed_over(x.device, sizes),
        eps,
        shared_bytes=ring.shared_bytes,
    )
    return y, summed


def kernel(
    sizes: Sizes, ring: Ring, has_bias: bool, is_normalized: bool, kind: Activation, dtype: torch.dtype
) -> CudaKernel:
    """What `mix` launches."""
    return cuda_kernel(
        "one_token_experts.cu",
        "mix_token",
        SIZE=sizes.columns,
        INNER=sizes.inner,
        EXPERTS=sizes.num_experts,
        NUM_PICKED=sizes.num_picked,
        WARPS=_WARPS,
        PAIRS=ring.pairs,
        ROWS=ring.rows,
        SLOTS=ring.slots,
        FLIGHT=ring.flight,
        MOST_PAIRS=ring.most_pairs,
        MOST_ROWS=ring.most_rows,
        HAS_BIAS=int(has_bias),
        IS_NORMALIZED=int(is_normalized),
        KIND=_KINDS[kind],
        IS_HALF=int(dtype == torch.float16),
    )


def _sizes(gate_up: torch.Tensor, num_picked: int) -> Sizes:
    num_experts, num_rows, columns = gate_up.shape
    return Sizes(columns, num_rows // 2, num_experts, num_picked)


@functools.cache
def _handed_over(device: torch.device, sizes: Sizes) -> torch.Tensor:
    """What programs hand to each other, behind the epoch of the next launch; see `one_token_experts.cu`.

    Each launch writes all of it, so that what is there is of the launch before.
    """
    num_words = _EPOCH_WORDS + sizes.num_experts + sizes.num_picked * sizes.inner
    words = torch.zeros(num_words, dtype=torch.int32, device=device)
    words[0] = 1
    return words


def _ring(device: torch.device, sizes: Sizes) -> Ring | None:
    return ring_for(sizes, num_processors(device), shared_memory_bytes(device))


@functools.cache
def ring_for(sizes: Sizes, processors: int, shared_bytes: int) -> Ring | None:
    """The ring of a mixture on a GPU whose programs may have so much shared memory; None if none fits."""
    columns, inner = sizes.columns, sizes.inner
    if columns % _CHUNK or columns > _MOST_COLUMNS or inner % _CHUNK or inner > _MOST_INNER:
        return None
    if sizes.num_experts % _WARP or sizes.num_experts > min(_MOST_EXPERTS, processors):
        return None
    if sizes.num_picked > min(_WARP, sizes.num_experts):
        return None
    pairs = max(1, _STAGE_BYTES // (4 * columns))
    stage_bytes = pairs * 4 * columns
    rows = stage_bytes // (2 * inner)
    if rows == 0 or pairs > inner:
        return None
    most_pairs = _ceil_div(_ceil_div(sizes.num_picked * inner, processors), pairs) * pairs
    most_rows = _ceil_div(columns, processors)
    words = 2 * _WARPS + sizes.num_experts + 1 + 2 * most_pairs + sizes.num_picked * (1 + most_rows)
    used = 2 * columns + 4 * words
    slots = (shared_bytes - used) // (stage_bytes + 16)  # with the barriers
    if slots < 2:
        return None
    slots -= slots % _WARPS if slots > _WARPS else 0  # a slot of down is one warp's
    flight = min(_ceil_div(_FLIGHT_BYTES, stage_bytes), slots - 1)
    return Ring(pairs, rows, slots, flight, most_pairs, most_rows, used + slots * (stage_bytes + 16))


def _ceil_div(number: int, by: int) -> int:
    return -(-number // by)
