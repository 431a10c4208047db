"""Products with quantised matrices, whose weights are unpacked in registers; see `quant.packed`.

`reference.quantized_linear` and `reference.quantized_experts` specify the ops. Inputs become
fixed-point numbers first (`quantized_inputs`), so that four weights are multiplied with four bytes of them
in one instruction and integers are summed; scale and minimum are applied to the sum of a group,

    y = sum over groups of scale * step * (sum of q n) - (scale * offset + minimum) * sum of x,

where n are the fixed-point inputs and x = step * n. Nothing is rounded but x, as `quantized_inputs` says,
and sums of float32.

Many tokens (prefill) unpack the matrix and take a dense product instead. Nothing is read back to the
host. A token's result does not depend on the other tokens of its batch within each of the two ways.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous
from dayshift.engine.kernels.quantized_fields import (
    constants_of,
    dot4,
    has_dot4,
    load_scale,
    planes_of,
    quad_of,
    scale_from,
    words_of,
)
from dayshift.engine.kernels.quantized_inputs import FixedPoint, fixed_point
from dayshift.engine.kernels.quantized_unpack import dequantize_packed
from dayshift.engine.quant.packed import PackedMatrix

__all__ = ["MAX_TOKENS", "dequantize_packed", "quantized_experts", "quantized_linear"]

MAX_TOKENS = 16
"""Beyond it the weights are unpacked once for all tokens."""

_MAX_TILE_TOKENS = 4
_TILE_LANES = 32  # one a thread


def quantized_linear(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """y = x wᵀ. Shapes and dtypes as in `reference.quantized_linear`."""
    num_tokens = len(x)
    if num_tokens > MAX_TOKENS:
        return F.linear(x, dequantize_packed(matrix, x.dtype))
    y = torch.empty((num_tokens, matrix.num_rows), dtype=x.dtype, device=x.device)
    if num_tokens:
        tile_tokens = min(padded(num_tokens), _MAX_TILE_TOKENS)
        _launch(fixed_point(x), x, matrix, y, num_tokens, tile_tokens, 0)
    return y


def quantized_experts(x: torch.Tensor, expert_ids: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """Each token by its experts. Shapes and dtypes as in `reference.quantized_experts`.

    Every pick reads its expert's matrix, so this is for few tokens.
    """
    num_picks = expert_ids.numel()
    y = torch.empty((num_picks, matrix.num_rows), dtype=x.dtype, device=x.device)
    if num_picks:
        _launch(fixed_point(x), expert_ids, matrix, y, num_picks, 1, num_picks // len(x))
    return y


def tile_rows(num_rows: int, num_programs: int) -> int:
    """Rows of a program of all `num_programs`: inputs are read for several, but all processors have some."""
    rows = 4 if num_programs >= 8192 else 2
    return math.gcd(num_rows, rows)


def _launch(
    x: FixedPoint,
    expert_ids: torch.Tensor,
    matrix: PackedMatrix,
    y: torch.Tensor,
    num_tokens: int,
    tile_tokens: int,
    picks_per_input: int,
) -> None:
    rows = tile_rows(matrix.num_rows, matrix.num_rows * (num_tokens if picks_per_input else 1))
    grid = (matrix.num_rows // rows, triton.cdiv(num_tokens, tile_tokens))
    _multiply_rows[grid](
        x.parts,
        x.steps,
        x.sums,
        expert_ids,
        *planes_of(matrix),
        y,
        num_tokens,
        NUM_ROWS=matrix.num_rows,
        **constants_of(matrix),
        NUM_PARTS=x.num_parts,
        TILE_ROWS=rows,
        TILE_LANES=_TILE_LANES,
        TILE_TOKENS=tile_tokens,
        PICKS_PER_INPUT=picks_per_input,
        HAS_DOT4=has_dot4(y.device),
        **overlap_options(y.device),
        num_warps=1,
    )


@triton.jit
def _multiply_rows(
    parts_ptr,
    steps_ptr,
    sums_ptr,
    expert_ids_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    minimums_ptr,
    group_scales_ptr,
    group_minimums_ptr,
    y_ptr,
    num_tokens,
    NUM_ROWS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HALVES: tl.constexpr,  # groups in a lane
    SCALE_LANES: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PICKS_PER_INPUT: tl.constexpr,
    HAS_DOT4: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """TILE_ROWS rows by TILE_TOKENS tokens; with PICKS_PER_INPUT, by one pick of an expert.

    Tiles are (tokens, lanes). Rows are unrolled, each with its own sum: a thread has a lane of every row.
    """
    row = tl.program_id(0) * TILE_ROWS
    token = tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None]
    is_token = token < num_tokens
    x_row = token
    matrix_row = row.to(tl.int64)
    if PICKS_PER_INPUT:
        # The picks: written before the kernel in front of this one, which lets it begin once it has waited.
        matrix_row += tl.load(expert_ids_ptr + tl.program_id(1)) * NUM_ROWS
        x_row = token // PICKS_PER_INPUT
    totals = ()
    for _ in tl.static_range(TILE_ROWS):
        totals += (tl.zeros((TILE_TOKENS, TILE_LANES), tl.float32),)
    # Weights are asked for a turn ahead, at first before the inputs are there.
    weights = _load_lanes(
        low_ptr,
        high_ptr,
        scales_ptr,
        minimums_ptr,
        group_scales_ptr,
        group_minimums_ptr,
        matrix_row,
        0,
        NUM_LANES,
        LOW_BITS,
        HIGH_BITS,
        SCALE_LANES,
        HAS_GROUPS,
        HAS_MINIMUM,
        TILE_ROWS,
        TILE_LANES,
    )
    wait_for_previous(OVERLAPS)
    for first in tl.range(0, NUM_LANES, TILE_LANES):
        next_weights = _load_lanes(
            low_ptr,
            high_ptr,
            scales_ptr,
            minimums_ptr,
            group_scales_ptr,
            group_minimums_ptr,
            matrix_row,
            first + TILE_LANES,
            NUM_LANES,
            LOW_BITS,
            HIGH_BITS,
            SCALE_LANES,
            HAS_GROUPS,
            HAS_MINIMUM,
            TILE_ROWS,
            TILE_LANES,
        )
        n = ()
        for part in tl.static_range(NUM_PARTS):
            x_part = parts_ptr + (x_row * NUM_PARTS + part) * (NUM_LANES * 8)
            n += words_of(x_part, first, is_token, 8, NUM_LANES, TILE_LANES)
        lane = first + tl.arange(0, TILE_LANES)[None, :]
        step = tl.load(steps_ptr + x_row * NUM_LANES + lane, is_token & (lane < NUM_LANES), other=0.0)
        sums = words_of(sums_ptr + x_row * (2 * NUM_LANES), first, is_token, 2, NUM_LANES, TILE_LANES)
        added = ()
        for i in tl.static_range(TILE_ROWS):
            product = _multiply_lanes(
                weights[i],
                n,
                step,
                sums,
                LOW_BITS,
                HIGH_BITS,
                HALVES,
                OFFSET,
                HAS_GROUPS,
                HAS_MINIMUM,
                IS_FLOAT4,
                NUM_PARTS,
                HAS_DOT4,
            )
            added += (totals[i] + product,)
        totals = added
        weights = next_weights
    let_next_begin(OVERLAPS)
    y = y_ptr + token.to(tl.int64) * NUM_ROWS + row
    for i in tl.static_range(TILE_ROWS):
        of_row = tl.sum(totals[i], axis=1, keep_dims=True)
        tl.store(y + i, of_row.to(y_ptr.dtype.element_ty), mask=is_token)


@triton.jit
def _load_lanes(
    low_ptr,
    high_ptr,
    scales_ptr,
    minimums_ptr,
    group_scales_ptr,
    group_minimums_ptr,
    row,
    first,
    NUM_LANES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_LANES: tl.constexpr,
):
    """For each row, what `_multiply_lanes` needs of its lanes from `first` on."""
    lane = first + tl.arange(0, TILE_LANES)[None, :]
    is_lane = lane < NUM_LANES
    rows = ()
    for i in tl.static_range(TILE_ROWS):
        at = row + i
        low = words_of(low_ptr + at * (NUM_LANES * LOW_BITS), first, True, LOW_BITS, NUM_LANES, TILE_LANES)
        high, minimum = (), ()
        if HIGH_BITS:
            of_row = high_ptr + at * (NUM_LANES * HIGH_BITS)
            high = words_of(of_row, first, True, HIGH_BITS, NUM_LANES, TILE_LANES)
        scale = load_scale(
            scales_ptr, group_scales_ptr, at, lane, is_lane, NUM_LANES, SCALE_LANES, HAS_GROUPS
        )
        if HAS_MINIMUM:
            minimum = load_scale(
                minimums_ptr, group_minimums_ptr, at, lane, is_lane, NUM_LANES, SCALE_LANES, HAS_GROUPS
            )
        rows += ((low, high, scale, minimum),)
    return rows


@triton.jit
def _multiply_lanes(
    weights,
    n,
    step,
    sums,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    HALVES: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_DOT4: tl.constexpr,
):
    """The products of a row's lanes with those of the inputs, (tokens, lanes) float32."""
    low, high, scales, minimums = weights
    product = tl.zeros(step.shape, tl.float32)
    for half in tl.static_range(HALVES):
        of_qn = tl.zeros(step.shape, tl.float32)
        for part in tl.static_range(NUM_PARTS):
            of_part = tl.zeros(step.shape, tl.int32)
            for i in tl.static_range(8 // HALVES):
                of_part = dot4(
                    quad_of(low, high, 4 * half + i, LOW_BITS, HIGH_BITS, IS_FLOAT4, HAS_DOT4),
                    n[8 * part + 4 * half + i],
                    of_part,
                    IS_FLOAT4,
                    part == NUM_PARTS - 1,
                    HAS_DOT4,
                )
            of_qn += of_part.to(tl.float32) * (1 << (8 * part))
        scale = scale_from(scales, half, HAS_GROUPS, IS_FLOAT4)
        product += scale * (step * of_qn)
        if OFFSET or HAS_MINIMUM:
            taken = scale * OFFSET
            if HAS_MINIMUM:
                taken += scale_from(minimums, half, HAS_GROUPS, False)
            product -= taken * (sums[half] if HALVES == 2 else sums[0] + sums[1])
    return product
