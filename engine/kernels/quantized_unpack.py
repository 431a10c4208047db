"""Packed matrices as floats, for products of many tokens; see `quant.packed`."""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.quantized_fields import constants_of, load_scale, planes_of, scale_from
from dayshift.engine.quant.packed import LANE, PackedMatrix

_TILE_LANES = 32


def dequantize_packed(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix as float32, float16 or bfloat16. As `reference.dequantize_packed`."""
    num_rows = len(matrix.low)
    weights = torch.empty((num_rows, matrix.num_columns), dtype=dtype, device=matrix.low.device)
    grid = (num_rows, triton.cdiv(matrix.num_columns // LANE, _TILE_LANES))
    _unpack_row[grid](*planes_of(matrix), weights, **constants_of(matrix), TILE_LANES=_TILE_LANES)
    experts = () if matrix.num_experts is None else (matrix.num_experts,)
    return weights.view(*experts, matrix.num_rows, matrix.num_columns)


@triton.jit
def _unpack_row(
    low_ptr,
    high_ptr,
    scales_ptr,
    minimums_ptr,
    group_scales_ptr,
    group_minimums_ptr,
    weights_ptr,
    NUM_LANES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HALVES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    TILE_LANES: tl.constexpr,
):
    """TILE_LANES lanes of one row. Tiles are (lanes, quads, QUAD)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * TILE_LANES + tl.arange(0, TILE_LANES)[:, None, None]
    quad = tl.arange(0, 8)[None, :, None]
    weight = tl.arange(0, 4)[None, None, :]
    is_inside = lane < NUM_LANES

    LOW_QUADS: tl.constexpr = 8 // LOW_BITS  # in a word
    low = tl.load(low_ptr + (row * NUM_LANES + lane) * LOW_BITS + quad // LOW_QUADS, is_inside, other=0)
    if IS_FLOAT4:
        code = low >> (quad % 2 * 16 + weight * 4)
        size = (-0x379BCDF0 >> ((code & 7) * 4)) & 15  # 0xC8643210, a table of eight nibbles
        q = tl.where((code & 8) != 0, -size, size)
    else:
        q = (low >> (quad % LOW_QUADS * LOW_BITS + weight * 8)) & ((1 << LOW_BITS) - 1)
    if HIGH_BITS:
        HIGH_QUADS: tl.constexpr = 8 // HIGH_BITS
        word = (row * NUM_LANES + lane) * HIGH_BITS + quad // HIGH_QUADS
        high = tl.load(high_ptr + word, is_inside, other=0)
        high = (high >> (quad % HIGH_QUADS * HIGH_BITS + weight * 8)) & ((1 << HIGH_BITS) - 1)
        q |= high << LOW_BITS

    half = quad // 4 if HALVES == 2 else quad * 0
    scale = load_scale(scales_ptr, group_scales_ptr, row, lane, is_inside, NUM_LANES, SCALE_LANES, HAS_GROUPS)
    weights = scale_from(scale, half, HAS_GROUPS, IS_FLOAT4) * (q - OFFSET).to(tl.float32)
    if HAS_MINIMUM:
        minimum = load_scale(
            minimums_ptr, group_minimums_ptr, row, lane, is_inside, NUM_LANES, SCALE_LANES, HAS_GROUPS
        )
        weights -= scale_from(minimum, half, HAS_GROUPS, False)
    out = weights_ptr + row * (NUM_LANES * 32) + lane * 32 + quad * 4 + weight
    tl.store(out, weights.to(weights_ptr.dtype.element_ty), mask=is_inside)
