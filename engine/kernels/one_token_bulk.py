"""`one_token_linear` where bulk copies fill the shared memory: weights flow while kernels hand over.

One program for each processor has nearly all of its shared memory, a ring of rows. One thread asks for rows
by bulk copies; warps multiply them by the token, which they hold in registers. The programs of the next
kernel, launched once this one has its token, get a processor as soon as it is free, and fill their ring while
others still multiply, while their token is awaited, and while attention runs, which fits beside them.

Every program has as many rows as any other, within one. Written in CUDA C++ (`cuda_source`), for GPUs of
capability 9.0 and more.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from dayshift.engine.kernels.cuda_source import CudaKernel, cuda_kernel
from dayshift.engine.kernels.launch import num_processors, overlap_options, shared_memory_bytes
from dayshift.engine.models.config import Activation

_SPARE_BYTES = 20_480  # of shared memory, for attention of one token beside
_STAGE_BYTES = 32_768
_MAX_PIECE = 2048  # columns of a warp: what its registers hold
_CHUNK = 256  # columns that a warp reads at once
_MAX_WARPS = 8
_FLIGHT_BYTES = 65_536  # on their way at once; more would keep waiting what is asked for beside them
_LEAST_WEIGHTS = 1 << 23  # of the products that were measured
_KINDS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


@dataclass(frozen=True, slots=True)
class Ring:
    """How a program's rows pass through its shared memory; see `one_token_bulk.cu`."""

    parts: int  # of a row, each for a warp
    warps: int
    stage: int  # pieces (parts of rows) that arrive together
    pieces: int  # in shared memory
    flight: int  # stages on their way at once
    shared_bytes: int


def can_multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    kind: Activation | None = None,
) -> bool:
    """`multiply` can do it, and is the faster way on an H200: see docs/engine-speed.md."""
    narrow = [tensor for tensor in (x, weight, bias, residual) if tensor is not None]
    wide = [] if norm_weight is None else [norm_weight]
    return (
        overlap_options(x.device)["OVERLAPS"]
        and weight.numel() >= _LEAST_WEIGHTS
        and x.dtype in (torch.bfloat16, torch.float16)
        and all(tensor.dtype == x.dtype for tensor in narrow)
        and all(tensor.dtype == torch.float32 for tensor in wide)
        and (norm_weight is None) == (residual is None)
        and (kind is None or bias is None)
        and all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in [*narrow, *wide])
        and _ring(weight, norm_weight, kind) is not None
    )


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `one_token_linear.multiply`, for what `can_multiply`."""
    num_weight_rows, size = weight.shape
    num_rows = num_weight_rows // 2 if kind else num_weight_rows
    y = torch.empty((1, num_rows), dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty_like(x)
    ring = _ring(weight, norm_weight, kind)
    assert ring is not None
    kernel(size, ring, norm_weight is not None, bias is not None, kind, x.dtype).launch(
        num_processors(x.device),
        (ring.warps + 1) * 32,
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        y,
        summed,
        num_rows,
        eps,
        shared_bytes=ring.shared_bytes,
    )
    return y, summed


def kernel(
    size: int, ring: Ring, has_norm: bool, has_bias: bool, kind: Activation | None, dtype: torch.dtype
) -> CudaKernel:
    """What `multiply` launches."""
    return cuda_kernel(
        "one_token_bulk.cu",
        "multiply_token",
        SIZE=size,
        PARTS=ring.parts,
        WARPS=ring.warps,
        STAGE=ring.stage,
        RING=ring.pieces,
        FLIGHT=ring.flight,
        HAS_NORM=int(has_norm),
        HAS_BIAS=int(has_bias),
        KIND=_KINDS[kind],
        IS_HALF=int(dtype == torch.float16),
    )


def _ring(weight: torch.Tensor, norm_weight: torch.Tensor | None, kind: Activation | None) -> Ring | None:
    device = weight.device
    return ring_for(
        *weight.shape, norm_weight is not None, kind, num_processors(device), shared_memory_bytes(device)
    )


@functools.cache
def ring_for(
    num_weight_rows: int,
    size: int,
    has_norm: bool,
    kind: Activation | None,
    processors: int,
    shared_bytes: int,
) -> Ring | None:
    """The ring of a product on a GPU whose programs may have so much shared memory; None if none fits."""
    parts = next(
        (n for n in range(1, _MAX_WARPS + 1) if size % (n * _CHUNK) == 0 and size <= n * _MAX_PIECE), 0
    )
    if not parts:
        return None
    piece_bytes, warps, weight_rows = size // parts * 2, _MAX_WARPS // parts * parts, 2 if kind else 1
    out_parts = parts * weight_rows
    most_outs = max(1, _STAGE_BYTES // (out_parts * piece_bytes))
    stage = out_parts * (1 << most_outs.bit_length() - 1)  # so that few stages are a turn of all warps
    num_outs = -(-num_weight_rows // weight_rows // processors)
    num_sums = -(-num_outs * out_parts // stage) * stage
    used = 4 * (num_sums + warps) + (2 * size if has_norm else 0)
    turn = math.lcm(stage, warps)
    turn_bytes = turn * piece_bytes + 16 * (turn // stage)  # with the barriers
    pieces = turn * ((shared_bytes - _SPARE_BYTES - used) // turn_bytes)
    if pieces < 2 * stage:
        return None
    flight = min(-(-_FLIGHT_BYTES // (stage * piece_bytes)), pieces // stage - 1)
    return Ring(parts, warps, stage, pieces, flight, used + turn_bytes * (pieces // turn))
