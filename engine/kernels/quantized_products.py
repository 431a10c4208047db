"""The kernel of products with quantised matrices, for few tokens; see `quantized` and `quant.packed`.

Inputs are fixed-point numbers (`quantized_inputs`), so that four weights are multiplied with four bytes of
them in one instruction and integers are summed; scale and minimum are applied to the sum of a group,

    y = sum over groups of scale * step * (sum of q n) - (scale * offset + minimum) * sum of x,

where n are the fixed-point inputs and x = step * n. Nothing is rounded but x, as `quantized_inputs` says,
and sums of float32.

What comes behind the product happens in the same launch: the bias, the gated activation of a layer of gate
and up, or the weighted sum of what the experts of a token give.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.activation import gated_narrow
from dayshift.engine.kernels.launch import (
    let_next_begin,
    num_processors,
    overlap_options,
    padded,
    wait_for_previous,
)
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
from dayshift.engine.kernels.quantized_inputs import FixedPoint
from dayshift.engine.models.config import Activation
from dayshift.engine.quant.packed import LANE, PackedMatrix

_MAX_TILE_TOKENS = 4
_WARP_LANES = 32  # one a thread


@dataclass(frozen=True, slots=True)
class Picks:
    """Experts of tokens, and what their matrices do with them."""

    expert_ids: torch.Tensor  # int64 (num_tokens, num_picked)
    weights: torch.Tensor  # float32 (num_tokens, num_picked)
    is_summed: bool
    """One output for each token, the weighted sum of its picks, each with an input of its own. Otherwise one
    for each pick, all picks of a token with the same input."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch cuts a matrix."""

    rows: int  # for a program
    num_warps: int  # that share the lanes of a row


def multiply(
    x: FixedPoint,
    matrix: PackedMatrix,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    kind: Activation | None = None,
    picks: Picks | None = None,
) -> None:
    """Write the product of each token of x, or of each of its picks, into y (num_outputs, num_rows), whose
    rows are contiguous. With `kind` half as many, of a matrix of gate and up. `bias` is (num_rows,), or
    (num_experts, num_rows)."""
    num_outputs = len(y)
    if num_outputs == 0:
        return
    experts, num_picked, tile_tokens, tile_picks = "none", 0, min(padded(num_outputs), _MAX_TILE_TOKENS), 1
    if picks is not None:
        experts, num_picked, tile_tokens = "each", picks.expert_ids.shape[1], 1
    tiles = tiles_for(matrix, num_picked, num_processors(y.device))
    rows, num_warps, tile_lanes = tiles.rows, tiles.num_warps, _WARP_LANES * tiles.num_warps
    if picks is not None and picks.is_summed:  # a warp for each pick
        experts, tile_picks = "summed", padded(num_picked)
        num_warps, tile_lanes = min(tile_picks, 8), _WARP_LANES
    per_program = rows // 2 if kind else rows
    unread = x.parts
    _multiply_rows[(triton.cdiv(y.shape[1], per_program), triton.cdiv(num_outputs, tile_tokens))](
        x.parts,
        x.steps,
        x.sums,
        unread if picks is None else picks.expert_ids,
        unread if picks is None else picks.weights,
        *planes_of(matrix),
        unread if bias is None else bias.contiguous(),
        y,
        num_outputs,
        y.stride(0),
        NUM_ROWS=matrix.num_rows,
        **constants_of(matrix),
        NUM_PARTS=x.num_parts,
        TILE_ROWS=rows,
        TILE_LANES=tile_lanes,
        TILE_TOKENS=tile_tokens,
        TILE_PICKS=tile_picks,
        EXPERTS=experts,
        NUM_PICKED=num_picked,
        HAS_BIAS=bias is not None,
        KIND=kind,
        IS_EVEN=y.shape[1] % per_program == 0,
        BEGINS_EARLY=num_warps == 1,
        HAS_DOT4=has_dot4(y.device),
        **overlap_options(y.device),
        num_warps=num_warps,
    )


def tiles_for(matrix: PackedMatrix, num_picked: int, num_processors: int) -> Tiles:
    """The tiles of a product, as they were fastest for one token on an H200: see docs/models.md.

    A row is shared by more warps the fewer rows there are for each processor, and the longer it is. The
    number of tokens does not count: sums would have another order.
    """
    num_lanes = matrix.num_columns // LANE
    are_few = matrix.num_rows * max(1, num_picked) < 32 * num_processors
    if num_lanes > 192:
        tiles = Tiles(rows=2 if are_few else 4, num_warps=2)
    else:
        tiles = Tiles(rows=4, num_warps=4 if are_few and num_lanes > 64 else 1)
    return replace(tiles, rows=min(tiles.rows, 1 << (matrix.num_rows.bit_length() - 1)))


@triton.jit
def _multiply_rows(
    parts_ptr,
    steps_ptr,
    sums_ptr,
    expert_ids_ptr,
    pick_weights_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    minimums_ptr,
    group_scales_ptr,
    group_minimums_ptr,
    bias_ptr,
    y_ptr,
    num_outputs,
    y_stride,
    NUM_ROWS: tl.constexpr,  # of a matrix
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
    TILE_PICKS: tl.constexpr,
    EXPERTS: tl.constexpr,  # none, each pick by itself, or a token's summed
    NUM_PICKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,  # of the gated activation, or None
    IS_EVEN: tl.constexpr,  # no program reaches beyond the matrix
    BEGINS_EARLY: tl.constexpr,  # the next kernel, on processors that have nothing left to do
    HAS_DOT4: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """TILE_ROWS rows by TILE_TOKENS tokens, by one pick, or by all picks of a token.

    Tiles are (TILE_PICKS, TILE_LANES), one pick if none are summed. Rows and tokens are unrolled: a thread
    has a lane of each, and a token's sums have one order, however many there are.
    """
    HEIGHT: tl.constexpr = TILE_ROWS if KIND is None else TILE_ROWS // 2  # of the output
    OUT_ROWS: tl.constexpr = NUM_ROWS if KIND is None else NUM_ROWS // 2
    first_row = tl.program_id(0) * HEIGHT
    if not IS_EVEN:  # rows at the end are computed twice, with the same result
        first_row = tl.minimum(first_row, OUT_ROWS - HEIGHT)
    first_output = tl.program_id(1) * TILE_TOKENS
    pick = tl.arange(0, TILE_PICKS)[:, None]
    is_pick = pick < 1
    x_row = first_output + pick
    matrix_row = first_row.to(tl.int64)
    # Picks were written before the kernel in front of this one, which lets it begin once it has waited.
    if EXPERTS == "each":
        matrix_row += tl.load(expert_ids_ptr + first_output) * NUM_ROWS
        x_row //= NUM_PICKED
    if EXPERTS == "summed":
        is_pick = pick < NUM_PICKED
        x_row = first_output * NUM_PICKED + pick
        matrix_row += tl.load(expert_ids_ptr + x_row, is_pick, other=0) * NUM_ROWS
    totals = ()
    for _ in tl.static_range(TILE_TOKENS * TILE_ROWS):
        totals += (tl.zeros((TILE_PICKS, TILE_LANES), tl.float32),)
    # Weights are asked for a turn ahead, at first before the inputs are there.
    weights = _load_lanes(
        low_ptr,
        high_ptr,
        scales_ptr,
        minimums_ptr,
        group_scales_ptr,
        group_minimums_ptr,
        matrix_row,
        is_pick,
        0,
        NUM_LANES,
        LOW_BITS,
        HIGH_BITS,
        SCALE_LANES,
        HAS_GROUPS,
        HAS_MINIMUM,
        HEIGHT,
        OUT_ROWS,
        TILE_ROWS,
        TILE_LANES,
        EXPERTS,
    )
    wait_for_previous(OVERLAPS)
    if BEGINS_EARLY:
        let_next_begin(OVERLAPS)
    for first in tl.range(0, NUM_LANES, TILE_LANES):
        next_weights = _load_lanes(
            low_ptr,
            high_ptr,
            scales_ptr,
            minimums_ptr,
            group_scales_ptr,
            group_minimums_ptr,
            matrix_row,
            is_pick,
            first + TILE_LANES,
            NUM_LANES,
            LOW_BITS,
            HIGH_BITS,
            SCALE_LANES,
            HAS_GROUPS,
            HAS_MINIMUM,
            HEIGHT,
            OUT_ROWS,
            TILE_ROWS,
            TILE_LANES,
            EXPERTS,
        )
        added = ()
        for t in tl.static_range(TILE_TOKENS):
            is_token = is_pick & (first_output + t < num_outputs)
            n, step, sums = _load_inputs(
                parts_ptr,
                steps_ptr,
                sums_ptr,
                x_row + t,
                is_token,
                first,
                NUM_LANES,
                NUM_PARTS,
                TILE_LANES,
            )
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
                added += (totals[t * TILE_ROWS + i] + product,)
        totals = added
        weights = next_weights
    if not BEGINS_EARLY:
        let_next_begin(OVERLAPS)

    narrow: tl.constexpr = y_ptr.dtype.element_ty
    for t in tl.static_range(TILE_TOKENS):
        outs = ()
        for i in tl.static_range(TILE_ROWS):
            out = tl.sum(totals[t * TILE_ROWS + i], axis=1, keep_dims=True)  # (TILE_PICKS, 1)
            if HAS_BIAS:
                bias = bias_ptr + matrix_row + (i % HEIGHT + i // HEIGHT * OUT_ROWS)
                out += tl.load(bias).to(tl.float32)
            outs += (out,)
        output = first_output + t
        for i in tl.static_range(HEIGHT):
            out = outs[i]
            if KIND is not None:
                out = gated_narrow(out, outs[i + HEIGHT], KIND, narrow)
            if EXPERTS == "summed":
                out *= tl.load(pick_weights_ptr + x_row, is_pick, other=0.0)
            y = tl.sum(tl.sum(out.to(tl.float32), axis=1), axis=0)
            to = y_ptr + output.to(tl.int64) * y_stride + first_row + i
            tl.store(to, y.to(narrow), mask=output < num_outputs)


@triton.jit
def _load_inputs(
    parts_ptr,
    steps_ptr,
    sums_ptr,
    row,
    is_inside,
    first,
    NUM_LANES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    TILE_LANES: tl.constexpr,
):
    """Quads of all parts, steps and sums of the halves of lanes from `first` on."""
    n = ()
    for part in tl.static_range(NUM_PARTS):
        of_part = parts_ptr + (row * NUM_PARTS + part) * (NUM_LANES * 8)
        n += words_of(of_part, first, is_inside, 8, NUM_LANES, TILE_LANES)
    lane = first + tl.arange(0, TILE_LANES)[None, :]
    step = tl.load(steps_ptr + row * NUM_LANES + lane, is_inside & (lane < NUM_LANES), other=0.0)
    sums = words_of(sums_ptr + row * (2 * NUM_LANES), first, is_inside, 2, NUM_LANES, TILE_LANES)
    return n, step, sums


@triton.jit
def _load_lanes(
    low_ptr,
    high_ptr,
    scales_ptr,
    minimums_ptr,
    group_scales_ptr,
    group_minimums_ptr,
    row,
    is_pick,
    first,
    NUM_LANES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    HEIGHT: tl.constexpr,
    OUT_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_LANES: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """For each row, what `_multiply_lanes` needs of its lanes from `first` on."""
    lane = first + tl.arange(0, TILE_LANES)[None, :]
    is_row = is_pick if EXPERTS == "summed" else True
    is_lane = is_row & (lane < NUM_LANES)
    rows = ()
    for i in tl.static_range(TILE_ROWS):
        at = row + (i % HEIGHT + i // HEIGHT * OUT_ROWS)
        low = words_of(low_ptr + at * (NUM_LANES * LOW_BITS), first, is_row, LOW_BITS, NUM_LANES, TILE_LANES)
        high, minimum = (), ()
        if HIGH_BITS:
            of_row = high_ptr + at * (NUM_LANES * HIGH_BITS)
            high = words_of(of_row, first, is_row, HIGH_BITS, NUM_LANES, TILE_LANES)
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
