"""Products with quantised matrices whose weights are unpacked in registers; see `quant.packed`.

`reference.quantized_linear` and `reference.quantized_experts` specify the ops. A program multiplies
some rows of a matrix by one or a few tokens, lane by lane: the eight integers of a lane are multiplied
by their inputs first, and scale and minimum are applied once to the sum,

    y = sum over lanes of scale * (sum of q x - offset * sum of x) - minimum * sum of x.

An integer becomes a float without a conversion, which GPUs do at half rate or less: its bits, where
they lie in the word, are the low bits of the mantissa of a float at 2**23, from which one fused
multiply-add takes what does not belong to it. Everything is computed in float32.

Many tokens (prefill) unpack the matrix and take a dense product instead. Nothing is read back to the
host. A token's result does not depend on the other tokens of its batch within each of the two ways.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from gguf import GGMLQuantizationType

from dayshift.engine.kernels.launch import padded
from dayshift.engine.quant.dequantize import OFFSETS
from dayshift.engine.quant.packed import LANE, PackedMatrix

MAX_TOKENS = 16
"""Beyond it the weights are unpacked once for all tokens."""

_MAX_TILE_TOKENS = 8
_TILE_ROWS = 4
_TILE_LANES = 128  # four a thread: 16 bytes of 4-bit weights
_UNPACK_LANES = 256


def quantized_linear(x: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """y = x wᵀ. Shapes and dtypes as in `reference.quantized_linear`."""
    num_tokens = len(x)
    if num_tokens > MAX_TOKENS:
        return F.linear(x, dequantize_packed(matrix, x.dtype))
    y = torch.empty((num_tokens, matrix.num_rows), dtype=x.dtype, device=x.device)
    if num_tokens:
        tile_tokens = min(padded(num_tokens), _MAX_TILE_TOKENS)
        grid = (triton.cdiv(matrix.num_rows, _TILE_ROWS), triton.cdiv(num_tokens, tile_tokens))
        _multiply_rows[grid](
            x,
            x,
            *_pointers(matrix),
            y,
            num_tokens,
            x.stride(0),
            **_constants(matrix),
            TILE_TOKENS=tile_tokens,
            PICKS_PER_INPUT=0,
            num_warps=1,
        )
    return y


def quantized_experts(x: torch.Tensor, expert_ids: torch.Tensor, matrix: PackedMatrix) -> torch.Tensor:
    """Each token by its experts. Shapes and dtypes as in `reference.quantized_experts`.

    Every pick reads its expert's matrix, so this is for few tokens.
    """
    num_picks = expert_ids.numel()
    y = torch.empty((num_picks, matrix.num_rows), dtype=x.dtype, device=x.device)
    if num_picks:
        grid = (triton.cdiv(matrix.num_rows, _TILE_ROWS), num_picks)
        _multiply_rows[grid](
            x,
            expert_ids,
            *_pointers(matrix),
            y,
            num_picks,
            x.stride(0),
            **_constants(matrix),
            TILE_TOKENS=1,
            PICKS_PER_INPUT=num_picks // len(x),
            num_warps=1,
        )
    return y


def dequantize_packed(matrix: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix as float32, float16 or bfloat16. As `reference.dequantize_packed`."""
    num_rows = len(matrix.low)
    weights = torch.empty((num_rows, matrix.num_columns), dtype=dtype, device=matrix.low.device)
    lanes = matrix.num_columns // LANE
    grid = (num_rows, triton.cdiv(lanes, _UNPACK_LANES))
    constants = _constants(matrix) | {"TILE_LANES": _UNPACK_LANES, "TILE_ROWS": 1}
    del constants["NUM_ROWS"]
    _unpack_row[grid](*_pointers(matrix), weights, **constants)
    experts = () if matrix.num_experts is None else (matrix.num_experts,)
    return weights.view(*experts, matrix.num_rows, matrix.num_columns)


def _pointers(matrix: PackedMatrix) -> list[torch.Tensor]:
    """All planes; one that a type does not have is never read."""
    return [matrix.low if plane is None else plane for plane in matrix.planes]


def _constants(matrix: PackedMatrix) -> dict[str, Any]:
    form = matrix.format
    return {
        "NUM_ROWS": matrix.num_rows,
        "NUM_LANES": matrix.num_columns // LANE,
        "LOW_BITS": form.low_bits,
        "HIGH_BITS": form.high_bits,
        "GROUP_LANES": form.group // LANE,
        "SCALE_LANES": matrix.num_columns // LANE // matrix.scales.shape[1],
        "OFFSET": OFFSETS.get(matrix.quant_type, 0),
        "HAS_GROUPS": matrix.group_scales is not None,
        "HAS_MINIMUM": matrix.minimums is not None,
        "IS_FLOAT4": matrix.quant_type == GGMLQuantizationType.MXFP4,
        "TILE_ROWS": _TILE_ROWS,
        "TILE_LANES": min(_TILE_LANES, padded(matrix.num_columns // LANE)),
    }


@triton.jit
def _element(low, high, E: tl.constexpr, LOW_BITS: tl.constexpr, HIGH_BITS: tl.constexpr):
    """Element E of int32 words as float32; of 8 bits, `low` is the half that holds it."""
    PLACE: tl.constexpr = (E % 4 if LOW_BITS == 8 else E) * LOW_BITS
    # The whole integer has to lie below bit 23; of what does not, the word is shifted first.
    SHIFT: tl.constexpr = PLACE // 20 * 20 if LOW_BITS == 4 else PLACE // 16 * 16
    AT: tl.constexpr = PLACE - SHIFT
    bits = (low >> SHIFT) & (((1 << LOW_BITS) - 1) << AT)
    if HIGH_BITS:
        MOVE: tl.constexpr = AT + LOW_BITS - E * HIGH_BITS
        moved = high << MOVE if MOVE >= 0 else high >> -MOVE
        bits = bits | (moved & (((1 << HIGH_BITS) - 1) << (AT + LOW_BITS)))
    as_float = (bits | 0x4B000000).to(tl.float32, bitcast=True)  # 2**23 + the bits
    return as_float * (1.0 / (1 << AT)) - (8388608.0 / (1 << AT))


@triton.jit
def _float4_element(low, E: tl.constexpr):
    """Element E of int32 words of e2m1 floats, doubled: 0 1 2 3 4 6 8 12 and their negatives."""
    code = low >> (4 * E)
    size = (-0x379BCDF0 >> ((code & 7) * 4)) & 15  # 0xC8643210, a table of eight nibbles
    as_float = (size | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    return tl.where((code & 8) != 0, -as_float, as_float)


@triton.jit
def _scale_of(
    scales_ptr,
    group_scales_ptr,
    row,
    lane,
    is_inside,
    NUM_LANES: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
):
    """The scale of each lane, float32."""
    scale = tl.load(
        scales_ptr + row * (NUM_LANES // SCALE_LANES) + lane // SCALE_LANES, mask=is_inside, other=0
    )
    if IS_FLOAT4:  # an exponent, one less because the floats are doubled
        exponent = scale.to(tl.int32)
        bits = tl.where(exponent < 2, 0x200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True)
    wide = scale.to(tl.float32)
    if HAS_GROUPS:
        of_group = group_scales_ptr + row * (NUM_LANES // GROUP_LANES) + lane // GROUP_LANES
        wide = wide * tl.load(of_group, mask=is_inside, other=0).to(tl.float32)
    return wide


@triton.jit
def _multiply_rows(
    x_ptr,
    expert_ids_ptr,
    low_ptr,
    high_ptr,
    scales_ptr,
    minimums_ptr,
    group_scales_ptr,
    group_minimums_ptr,
    y_ptr,
    num_tokens,
    x_stride,
    NUM_ROWS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    GROUP_LANES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_LANES: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PICKS_PER_INPUT: tl.constexpr,
):
    """TILE_ROWS rows by TILE_TOKENS tokens; with PICKS_PER_INPUT, by one pick of an expert.

    Tiles are (tokens, rows, lanes).
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)[None, :, None]
    token = tl.program_id(1) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)[:, None, None]
    is_row, is_token = row < NUM_ROWS, token < num_tokens
    matrix_row = row.to(tl.int64)
    x_row = x_ptr + token * x_stride
    if PICKS_PER_INPUT:
        expert = tl.load(expert_ids_ptr + tl.program_id(1)).to(tl.int64)
        matrix_row += expert * NUM_ROWS
        x_row = x_ptr + token // PICKS_PER_INPUT * x_stride
    LOW_COLUMNS: tl.constexpr = 2 * NUM_LANES if LOW_BITS == 8 else NUM_LANES
    total = tl.zeros((TILE_TOKENS, TILE_ROWS, TILE_LANES), tl.float32)
    for first in range(0, NUM_LANES, TILE_LANES):
        lane = first + tl.arange(0, TILE_LANES)[None, None, :]
        is_lane = lane < NUM_LANES
        is_inside = is_row & is_lane
        low_lane = low_ptr + matrix_row * LOW_COLUMNS + lane
        low = tl.load(low_lane, mask=is_inside, other=0).to(tl.int32)
        second = low
        if LOW_BITS == 8:
            second = tl.load(low_lane + NUM_LANES, mask=is_inside, other=0)
        high = low
        if HIGH_BITS:
            high = tl.load(high_ptr + matrix_row * NUM_LANES + lane, mask=is_inside, other=0).to(tl.int32)
        x_lane = x_row + lane // GROUP_LANES * (GROUP_LANES * 8) + lane % GROUP_LANES
        of_q = tl.zeros((TILE_TOKENS, TILE_ROWS, TILE_LANES), tl.float32)
        of_x = tl.zeros((TILE_TOKENS, 1, TILE_LANES), tl.float32)
        for e in tl.static_range(8):
            x = tl.load(x_lane + e * GROUP_LANES, mask=is_lane & is_token, other=0.0).to(tl.float32)
            if IS_FLOAT4:
                q = _float4_element(low, e)
            elif LOW_BITS == 8 and e >= 4:
                q = _element(second, high, e, LOW_BITS, HIGH_BITS)
            else:
                q = _element(low, high, e, LOW_BITS, HIGH_BITS)
            of_q += q * x
            of_x += x
        scale = _scale_of(
            scales_ptr,
            group_scales_ptr,
            matrix_row,
            lane,
            is_inside,
            NUM_LANES,
            GROUP_LANES,
            SCALE_LANES,
            HAS_GROUPS,
            IS_FLOAT4,
        )
        total += scale * (of_q - OFFSET * of_x if OFFSET else of_q)
        if HAS_MINIMUM:
            minimum = _scale_of(
                minimums_ptr,
                group_minimums_ptr,
                matrix_row,
                lane,
                is_inside,
                NUM_LANES,
                GROUP_LANES,
                SCALE_LANES,
                HAS_GROUPS,
                False,
            )
            total -= minimum * of_x
    y = tl.sum(total, axis=2, keep_dims=True)
    y_row = y_ptr + token.to(tl.int64) * NUM_ROWS + row
    tl.store(y_row, y.to(y_ptr.dtype.element_ty), mask=is_row & is_token)


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
    GROUP_LANES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_LANES: tl.constexpr,
):
    """TILE_LANES lanes of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * TILE_LANES + tl.arange(0, TILE_LANES)
    is_inside = lane < NUM_LANES
    low_lane = low_ptr + row * (2 * NUM_LANES if LOW_BITS == 8 else NUM_LANES) + lane
    low = tl.load(low_lane, mask=is_inside, other=0).to(tl.int32)
    second = low
    if LOW_BITS == 8:
        second = tl.load(low_lane + NUM_LANES, mask=is_inside, other=0)
    high = low
    if HIGH_BITS:
        high = tl.load(high_ptr + row * NUM_LANES + lane, mask=is_inside, other=0).to(tl.int32)
    scale = _scale_of(
        scales_ptr,
        group_scales_ptr,
        row,
        lane,
        is_inside,
        NUM_LANES,
        GROUP_LANES,
        SCALE_LANES,
        HAS_GROUPS,
        IS_FLOAT4,
    )
    minimum = scale
    if HAS_MINIMUM:
        minimum = _scale_of(
            minimums_ptr,
            group_minimums_ptr,
            row,
            lane,
            is_inside,
            NUM_LANES,
            GROUP_LANES,
            SCALE_LANES,
            HAS_GROUPS,
            False,
        )
    column = lane // GROUP_LANES * (GROUP_LANES * 8) + lane % GROUP_LANES
    for e in tl.static_range(8):
        if IS_FLOAT4:
            q = _float4_element(low, e)
        elif LOW_BITS == 8 and e >= 4:
            q = _element(second, high, e, LOW_BITS, HIGH_BITS)
        else:
            q = _element(low, high, e, LOW_BITS, HIGH_BITS)
        weight = scale * (q - OFFSET)
        if HAS_MINIMUM:
            weight = weight - minimum
        out = weights_ptr + row * (NUM_LANES * 8) + column + e * GROUP_LANES
        tl.store(out, weight.to(weights_ptr.dtype.element_ty), mask=is_inside)
