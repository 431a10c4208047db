"""Inputs of products with quantised matrices, as fixed-point numbers: integers of two bytes or three.

GPUs multiply four bytes by four bytes and add the products in one instruction. 32 neighbouring inputs
share a step, a power of two, and an input is a whole number of steps,

    x = step * (part[0] + 256 * part[1] + ...),    step = 2 ** (e - 8 * num_parts + 1),

where 2 ** e is the least power of two above the largest of them. The last part is signed, all others are
not. Two parts hold a bfloat16 (8 significant bits) exactly if it is at least 1/128 of the largest of its
32, and what is smaller to within 1/32,768 of the largest; three parts hold other floats to within 2 ** -23
of it. The norm in front of a product is taken in the same launch, and is not rounded in between.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous
from dayshift.engine.quant.packed import LANE

_TILE_LANES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPoint:
    """Inputs of some tokens; lanes as of a packed matrix."""

    parts: torch.Tensor  # int32 (num_tokens, num_parts, num_columns / 4): four neighbours, a byte each
    steps: torch.Tensor  # float32 (num_tokens, num_columns / 32)
    sums: torch.Tensor  # float32 (num_tokens, num_columns / 16): of half a lane

    def __len__(self) -> int:
        return len(self.parts)

    @property
    def num_parts(self) -> int:
        """Bytes of an input."""
        return self.parts.shape[1]


def fixed_point(x: torch.Tensor) -> FixedPoint:
    """Two parts of bfloat16, three of other floats. x: (num_tokens, num_columns), a multiple of 32.

    All of a lane is NaN where one of its inputs is not finite.
    """
    points = empty_points(x, x.shape[1])
    num_lanes = x.shape[1] // LANE
    _fix_points[(triton.cdiv(num_lanes, _TILE_LANES), len(x))](
        x,
        points.parts.view(torch.int8),
        points.steps,
        points.sums,
        x.stride(0),
        NUM_LANES=num_lanes,
        NUM_PARTS=points.num_parts,
        TILE_LANES=_TILE_LANES,
        **overlap_options(x.device),
        num_warps=4,
    )
    return points


def fixed_norm(
    x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
) -> tuple[FixedPoint, torch.Tensor]:
    """`rms_norm` of x + residual as `fixed_point` gives it; and the sum, x's shape and dtype."""
    points, summed = empty_points(x, x.shape[1]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_lanes = x.shape[1] // LANE
    _norm_points[(len(x),)](
        x,
        residual,
        norm_weight,
        points.parts.view(torch.int8),
        points.steps,
        points.sums,
        summed,
        x.stride(0),
        residual.stride(0),
        eps,
        NUM_LANES=num_lanes,
        NUM_PARTS=points.num_parts,
        TILE_LANES=padded(num_lanes),
        **overlap_options(x.device),
        num_warps=min(16, max(4, padded(num_lanes) // 16)),
    )
    return points, summed


def empty_points(like: torch.Tensor, num_columns: int) -> FixedPoint:
    """Inputs that are yet to be written: so many for each row of `like`, for its dtype."""
    num_tokens, num_parts = len(like), 2 if like.dtype == torch.bfloat16 else 3
    quads, lanes = num_columns // 4, num_columns // LANE
    return FixedPoint(
        parts=torch.empty((num_tokens, num_parts, quads), dtype=torch.int32, device=like.device),
        steps=torch.empty((num_tokens, lanes), dtype=torch.float32, device=like.device),
        sums=torch.empty((num_tokens, 2 * lanes), dtype=torch.float32, device=like.device),
    )


@triton.jit
def _fix_points(
    x_ptr,
    parts_ptr,
    steps_ptr,
    sums_ptr,
    x_stride,
    NUM_LANES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE_LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """TILE_LANES lanes of one token."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    lane, half, column = _columns(tl.program_id(0) * TILE_LANES, TILE_LANES)
    x = tl.load(x_ptr + token * x_stride + column, mask=lane < NUM_LANES, other=0.0).to(tl.float32)
    store_points(x, parts_ptr, steps_ptr, sums_ptr, token, lane, half, column, NUM_LANES, NUM_PARTS)


@triton.jit
def _norm_points(
    x_ptr,
    residual_ptr,
    weight_ptr,
    parts_ptr,
    steps_ptr,
    sums_ptr,
    summed_ptr,
    x_stride,
    residual_stride,
    eps,
    NUM_LANES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE_LANES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """All lanes of one token."""
    token = tl.program_id(0).to(tl.int64)
    lane, half, column = _columns(0, TILE_LANES)
    is_inside = lane < NUM_LANES
    weight = tl.load(weight_ptr + column, mask=is_inside, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    x = tl.load(x_ptr + token * x_stride + column, mask=is_inside, other=0.0)
    residual = tl.load(residual_ptr + token * residual_stride + column, mask=is_inside, other=0.0)
    summed = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(summed_ptr + token * (NUM_LANES * 32) + column, summed, mask=is_inside)
    wide = summed.to(tl.float32)
    mean_square = tl.sum(tl.sum(tl.sum(wide * wide, axis=2), axis=1), axis=0) / (NUM_LANES * 32)
    y = wide * tl.rsqrt(mean_square + eps) * weight
    store_points(y, parts_ptr, steps_ptr, sums_ptr, token, lane, half, column, NUM_LANES, NUM_PARTS)


@triton.jit
def _columns(first, TILE_LANES: tl.constexpr):
    """Lane, half of a lane and column of a tile (TILE_LANES, 2, 16)."""
    lane = first + tl.arange(0, TILE_LANES)[:, None, None]
    half = tl.arange(0, 2)[None, :, None]
    return lane, half, lane * 32 + half * 16 + tl.arange(0, 16)[None, None, :]


@triton.jit
def store_points(
    x,
    parts_ptr,
    steps_ptr,
    sums_ptr,
    token,
    lane,
    half,
    column,
    NUM_LANES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Lanes x (lanes, 2, 16) float32 of a token as fixed-point numbers."""
    is_inside = lane < NUM_LANES
    largest = tl.max(tl.max(tl.abs(x), axis=2, keep_dims=True), axis=1, keep_dims=True)
    not_finite = tl.sum(tl.sum(x * 0.0, axis=2, keep_dims=True), axis=1, keep_dims=True)  # 0, or NaN

    BITS: tl.constexpr = 8 * NUM_PARTS - 1  # without the sign
    exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, BITS), 254)
    step = ((exponent - (BITS - 1)) << 23).to(tl.float32, bitcast=True)
    inverse = ((253 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
    steps = tl.minimum(tl.floor(x * inverse + 0.5), (1 << BITS) - 1).to(tl.int32)
    for part in tl.static_range(NUM_PARTS):
        to = parts_ptr + (token * NUM_PARTS + part) * (NUM_LANES * 32) + column
        tl.store(to, (steps >> (8 * part)).to(tl.int8), mask=is_inside)
    step += not_finite
    tl.store(steps_ptr + token * NUM_LANES + lane, step, mask=is_inside)
    sums = tl.sum(steps, axis=2, keep_dims=True).to(tl.float32) * step
    tl.store(sums_ptr + token * (2 * NUM_LANES) + lane * 2 + half, sums, mask=is_inside)
