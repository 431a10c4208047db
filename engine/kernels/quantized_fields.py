"""The fields of packed matrices, in registers; see `quant.packed`.

A quad is an int32 of four integers, a byte each. `dot4` multiplies two of them, in one instruction on a
GPU. Triton has no name for it, and its interpreter no assembly: there (HAS_DOT4 false) the same is spelt out.
"""

# Triton writes compile-time constants in capitals, and compiles what follows an `if` that returns.
# ruff: noqa: N803, N806, RET505
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gguf import GGMLQuantizationType

from dayshift.engine.quant.dequantize import OFFSETS
from dayshift.engine.quant.packed import LANE, PackedMatrix


def has_dot4(device: torch.device) -> bool:
    """Kernels for this device may take the instruction."""
    return device.type == "cuda"


def planes_of(matrix: PackedMatrix) -> list[torch.Tensor]:
    """All planes; one that a type does not have is never read. A lane's group scales are one number."""
    planes = [matrix.low if plane is None else plane for plane in matrix.planes]
    of_lane = torch.int8 if matrix.format.group == LANE else torch.int16
    return [plane.view(of_lane) if plane.dtype == torch.int8 else plane for plane in planes]


def constants_of(matrix: PackedMatrix) -> dict[str, Any]:
    """What kernels are compiled for."""
    num_lanes = matrix.num_columns // LANE
    return {
        "NUM_LANES": num_lanes,
        "LOW_BITS": matrix.format.low_bits,
        "HIGH_BITS": matrix.format.high_bits,
        "HALVES": LANE // matrix.format.group,
        "SCALE_LANES": num_lanes // matrix.scales.shape[1],
        "OFFSET": OFFSETS.get(matrix.quant_type, 0),
        "HAS_GROUPS": matrix.group_scales is not None,
        "HAS_MINIMUM": matrix.minimums is not None,
        "IS_FLOAT4": matrix.quant_type == GGMLQuantizationType.MXFP4,
    }


@triton.jit
def words_of(
    row_ptr, first, is_row, NUM_WORDS: tl.constexpr, NUM_LANES: tl.constexpr, TILE_LANES: tl.constexpr
):
    """A tuple of the words of lanes from `first` on, each (rows, TILE_LANES); pointers are (rows, 1)."""
    RUN: tl.constexpr = min(NUM_WORDS, 4)  # a thread reads 16 bytes at once
    at = tl.arange(0, TILE_LANES * RUN)[None, :]
    is_inside = is_row & (first + at // RUN < NUM_LANES)
    if NUM_WORDS == 8:
        run = row_ptr + first * 8 + at // 4 * 8 + at % 4
        return _split_four(tl.load(run, is_inside, other=0)) + _split_four(
            tl.load(run + 4, is_inside, other=0)
        )
    else:
        words = tl.load(row_ptr + first * NUM_WORDS + at, is_inside, other=0)
        if NUM_WORDS == 1:
            return (words,)
        elif NUM_WORDS == 2:
            return tl.split(tl.reshape(words, (words.shape[0], TILE_LANES, 2)))
        else:
            return _split_four(words)


@triton.jit
def _split_four(words):
    """(rows, 4 * lanes) -> four tensors (rows, lanes)."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], words.shape[1] // 4, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def quad_of(
    low,
    high,
    INDEX: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    IS_FLOAT4: tl.constexpr,
    HAS_DOT4: tl.constexpr,
):
    """Quad INDEX of lanes whose words are `low` and `high`."""
    if IS_FLOAT4:
        return _float4_quads(low[INDEX // 2], HAS_DOT4)[INDEX % 2]
    else:
        LOW_QUADS: tl.constexpr = 8 // LOW_BITS
        quad = low[INDEX // LOW_QUADS]
        if LOW_BITS < 8:
            quad = (quad >> (INDEX % LOW_QUADS * LOW_BITS)) & (((1 << LOW_BITS) - 1) * 0x01010101)
        if HIGH_BITS:
            HIGH_QUADS: tl.constexpr = 8 // HIGH_BITS
            MOVE: tl.constexpr = LOW_BITS - INDEX % HIGH_QUADS * HIGH_BITS
            bits = high[INDEX // HIGH_QUADS]
            bits = bits << MOVE if MOVE >= 0 else bits >> -MOVE
            quad |= bits & ((((1 << HIGH_BITS) - 1) << LOW_BITS) * 0x01010101)
        return quad


@triton.jit
def _float4_quads(word, HAS_DOT4: tl.constexpr):
    """Both quads of a word of e2m1 floats, doubled: 0 1 2 3 4 6 8 12 and their negatives."""
    if HAS_DOT4:
        return tl.inline_asm_elementwise(
            # Four nibbles look up the table of positives and that of negatives; their signs pick one of both.
            """{
            .reg .b32 size, sign, positive, negative;
            and.b32 size, $2, 0x77777777;
            shr.u32 sign, $2, 1;
            lop3.b32 sign, sign, 0x44444444, 0x32103210, 0xEA;
            prmt.b32 positive, 0x03020100, 0x0C080604, size;
            prmt.b32 negative, 0xFDFEFF00, 0xF4F8FAFC, size;
            prmt.b32 $0, positive, negative, sign;
            shr.u32 size, size, 16;
            shr.u32 sign, sign, 16;
            prmt.b32 positive, 0x03020100, 0x0C080604, size;
            prmt.b32 negative, 0xFDFEFF00, 0xF4F8FAFC, size;
            prmt.b32 $1, positive, negative, sign;
            }""",
            "=r,=r,r",
            [word],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        place = tl.arange(0, 4)[None, None, :]
        first, second = word[:, :, None] >> (4 * place), word[:, :, None] >> (16 + 4 * place)
        return (
            tl.sum((_float4(first) & 255) << (8 * place), axis=2),
            tl.sum((_float4(second) & 255) << (8 * place), axis=2),
        )


@triton.jit
def _float4(code):
    size = (-0x379BCDF0 >> ((code & 7) * 4)) & 15  # 0xC8643210, a table of eight nibbles
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def dot4(quad, x, total, QUAD_SIGNED: tl.constexpr, X_SIGNED: tl.constexpr, HAS_DOT4: tl.constexpr):
    """total + the sum of the products of four bytes with four bytes, int32."""
    if HAS_DOT4:
        if QUAD_SIGNED:
            QUAD: tl.constexpr = "s32"
        else:
            QUAD: tl.constexpr = "u32"
        if X_SIGNED:
            X: tl.constexpr = "s32"
        else:
            X: tl.constexpr = "u32"
        return tl.inline_asm_elementwise(
            "dp4a." + QUAD + "." + X + " $0, $1, $2, $3;",
            "=r,r,r,r",
            [quad, x, total],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return total + tl.sum(_bytes_of(quad, QUAD_SIGNED) * _bytes_of(x, X_SIGNED), axis=2)


@triton.jit
def _bytes_of(word, IS_SIGNED: tl.constexpr):
    """The four bytes of words (rows, lanes): int32 (rows, lanes, 4)."""
    place = 8 * tl.arange(0, 4)[None, None, :]
    if IS_SIGNED:
        return (word[:, :, None] << (24 - place)) >> 24
    else:
        return (word[:, :, None] >> place) & 255


@triton.jit
def load_scale(
    scales_ptr,
    group_scales_ptr,
    row,
    lane,
    is_inside,
    NUM_LANES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
):
    """What `scale_from` needs of lanes of a row, as it lies in memory."""
    scale = tl.load(scales_ptr + row * (NUM_LANES // SCALE_LANES) + lane // SCALE_LANES, is_inside, other=0)
    if HAS_GROUPS:
        return scale, tl.load(group_scales_ptr + row * NUM_LANES + lane, is_inside, other=0)
    else:
        return scale, scale


@triton.jit
def scale_from(fields, half, HAS_GROUPS: tl.constexpr, IS_FLOAT4: tl.constexpr):
    """The scale of a lane, or of its half, float32; or with the planes of the minimums, the minimum."""
    if IS_FLOAT4:  # an exponent, one less because the floats are doubled
        exponent = fields[0].to(tl.int32)
        bits = tl.where(exponent < 2, 0x200000 << tl.minimum(exponent, 1), (exponent - 1) << 23)
        return bits.to(tl.float32, bitcast=True)
    elif HAS_GROUPS:
        of_group = (fields[1].to(tl.int32) >> (8 * half)).to(tl.int8)
        return fields[0].to(tl.float32) * of_group.to(tl.float32)
    else:
        return fields[0].to(tl.float32)
