"""Inputs of products with quantised matrices, as fixed-point numbers: integers of a byte or three.

GPUs multiply four bytes by four bytes and add the products in one instruction. 32 neighbouring inputs
share a step, a power of two, and an input is a whole number of steps,

    x = step * (part[0] + 256 * part[1] + ...),    step = 2 ** (e - 8 * num_parts + 1),

where 2 ** e is the least power of two above the largest of them. The last part is signed, all others are
not. Two parts hold a bfloat16 (8 significant bits) exactly if it is at least 1/128 of the largest of its
32, and what is smaller to within 1/65,536 of the largest; three parts hold a float32 at least 1/1 of it.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, wait_for_previous
from dayshift.engine.quant.packed import LANE

_TILE_LANES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPoint:
    """Inputs of some tokens; lanes as of a packed matrix."""

    parts: torch.Tensor  # int32 (num_tokens, num_parts, num_columns / 4): four neighbours, a byte each
    steps: torch.Tensor  # float32 (num_tokens, num_columns / 32)
    sums: torch.Tensor  # float32 (num_tokens, num_columns / 16): of half a lane

    @property
    def num_parts(self) -> int:
        """Bytes of an input."""
        return self.parts.shape[1]


def fixed_point(x: torch.Tensor) -> FixedPoint:
    """Two parts of bfloat16, three of other floats. x: (num_tokens, num_columns), a multiple of 32.

    All of a lane is NaN where one of its inputs is not finite.
    """
    num_tokens, num_columns = x.shape
    num_parts = 2 if x.dtype == torch.bfloat16 else 3
    parts = torch.empty((num_tokens, num_parts, num_columns), dtype=torch.int8, device=x.device)
    steps = torch.empty((num_tokens, num_columns // LANE), dtype=torch.float32, device=x.device)
    sums = torch.empty((num_tokens, num_columns // LANE * 2), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(num_columns // LANE, _TILE_LANES), num_tokens)
    _fix_points[grid](
        x,
        parts,
        steps,
        sums,
        x.stride(0),
        NUM_LANES=num_columns // LANE,
        NUM_PARTS=num_parts,
        TILE_LANES=_TILE_LANES,
        **overlap_options(x.device),
        num_warps=4,
    )
    return FixedPoint(parts=parts.view(torch.int32), steps=steps, sums=sums)


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
    """TILE_LANES lanes of one token. Tiles are (lanes, halves, 16)."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    token = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * TILE_LANES + tl.arange(0, TILE_LANES)[:, None, None]
    half = tl.arange(0, 2)[None, :, None]
    column = lane * 32 + half * 16 + tl.arange(0, 16)[None, None, :]
    is_inside = lane < NUM_LANES
    x = tl.load(x_ptr + token * x_stride + column, mask=is_inside, other=0.0).to(tl.float32)
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
