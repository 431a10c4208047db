"""`attend_keys` over a pool of int8 or fp8 keys and values: see `quant.kv` and `kv_blocks`.

Half the bytes of bfloat16 leave half the time for each value, so conversions and rotations are done two
values at a time, in float16, which holds int8 and fp8 values as they are. Scales never touch the values: a
key's multiplies its scores, and a value's is added to them as a logarithm. So what the products take
stays within float16, whatever the scales are: weights are at most 1, and their sum is divided by the
scales again.
"""

# Triton writes compile-time constants in capitals, and compiles what follows an `if` that returns.
# ruff: noqa: N803, RET505
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from dayshift.engine.kernels.kv_blocks import load_scale, quantized_places, values_of

QUERY_FACTOR: tl.constexpr = tl.constexpr(2.0**-6)  # no query of a model is beyond float16 then
_SINK_LOG2: tl.constexpr = tl.constexpr(12.0)  # how far above the largest weight a sink may begin
LEAST_SCALE: tl.constexpr = tl.constexpr(2.0**-60)


def has_packed_halves(device: torch.device) -> bool:
    """Whether `attend_quantized_keys` may use PTX; Triton's interpreter has none."""
    return device.type == "cuda"


@triton.jit
def attend_quantized_keys(
    q1,
    q2,
    start,
    first_key,
    end_key,
    last_visible,
    kv_head,
    k_pool_ptr,
    v_pool_ptr,
    block_table_ptr,
    cos_sin_ptr,
    tile_cos,
    tile_sin,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SUM_LANES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Online softmax of one tile of rows over keys of a sequence; all as in `attend_keys`.

    PACKED: with PTX, for queries of 16 bits. A turn's scales are read in the turn before it: their loads
    are too narrow to be copied ahead like tiles.
    """
    narrow: tl.constexpr = tl.float32 if q1.dtype == tl.float32 else tl.float16
    dim = tl.arange(0, HALF_PAD)[None, :]
    in_tile = tl.arange(0, TILE_KEYS)
    q1 = (q1.to(tl.float32) * QUERY_FACTOR).to(narrow)
    q2 = (q2.to(tl.float32) * QUERY_FACTOR).to(narrow)
    if PACKED:
        tile_cos, tile_sin = tile_cos.to(tl.float16), tile_sin.to(tl.float16)
    keys_ptr, values_ptr = values_of(k_pool_ptr), values_of(v_pool_ptr)
    largest = start - _SINK_LOG2
    is_sink = (tl.arange(0, SUM_LANES)[None, :] == 0) & (start > float("-inf"))
    total = tl.where(is_sink, tl.exp2(_SINK_LOG2), 0.0)  # (TILE_ROWS, SUM_LANES)
    sum1 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    sum2 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    block, in_block = _blocks_of_tile(block_table_ptr, first_key, end_key, BLOCK_SIZE, TILE_KEYS)
    is_next = first_key + in_tile < end_key
    _, scale_place = quantized_places(block, in_block, kv_head, NUM_KV_HEADS, HALF, BLOCK_SIZE)
    next_k_scale = load_scale(k_pool_ptr, scale_place, is_next)
    next_v_scale = load_scale(v_pool_ptr, scale_place, is_next)
    for tile_key in range(first_key, end_key, TILE_KEYS):
        key = tile_key + in_tile
        place, _ = quantized_places(block, in_block, kv_head, NUM_KV_HEADS, HALF, BLOCK_SIZE)
        k_scale = next_k_scale * (SCALE / QUERY_FACTOR)
        log_v_scale = _log2(tl.maximum(next_v_scale, LEAST_SCALE), PACKED)
        block, in_block = _blocks_of_tile(
            block_table_ptr, tile_key + TILE_KEYS, end_key, BLOCK_SIZE, TILE_KEYS
        )
        is_next = key + TILE_KEYS < end_key
        _, scale_place = quantized_places(block, in_block, kv_head, NUM_KV_HEADS, HALF, BLOCK_SIZE)
        next_k_scale = load_scale(k_pool_ptr, scale_place, is_next)
        next_v_scale = load_scale(v_pool_ptr, scale_place, is_next)
        is_inside = (key < end_key)[:, None] & (dim < HALF)
        offset = place[:, None] + dim
        raw1 = tl.load(keys_ptr + offset, mask=is_inside, other=0.0)
        raw2 = tl.load(keys_ptr + offset + HALF, mask=is_inside, other=0.0)
        v1 = tl.load(values_ptr + offset, mask=is_inside, other=0.0)
        v2 = tl.load(values_ptr + offset + HALF, mask=is_inside, other=0.0)

        # Keys turn by the angles of the first positions, queries back by the angle of the tile's first key.
        first_angle = cos_sin_ptr + tile_key * (2 * HALF) + dim
        first_cos = tl.load(first_angle, mask=dim < HALF, other=0.0)
        first_sin = tl.load(first_angle + HALF, mask=dim < HALF, other=0.0)
        if PACKED:
            first_cos, first_sin = first_cos.to(tl.float16), first_sin.to(tl.float16)
            turned1, turned2 = _rotated(q1, q2, first_cos, -first_sin)
            is_pure: tl.constexpr = SUM_LANES == 1 and cuda_capability_geq(10, 0)
            k1, k2 = _rotated(_widened(raw1, is_pure), _widened(raw2, is_pure), tile_cos, tile_sin)
            v1, v2 = _widened(v1, is_pure), _widened(v2, is_pure)
        else:
            wide1, wide2 = raw1.to(tl.float32), raw2.to(tl.float32)
            turned1 = (q1 * first_cos + q2 * first_sin).to(narrow)
            turned2 = (q2 * first_cos - q1 * first_sin).to(narrow)
            k1 = (wide1 * tile_cos - wide2 * tile_sin).to(narrow)
            k2 = (wide2 * tile_cos + wide1 * tile_sin).to(narrow)
            v1, v2 = v1.to(narrow), v2.to(narrow)

        scores = tl.dot(turned1, tl.trans(k1), input_precision=PRECISION)
        scores = tl.dot(turned2, tl.trans(k2), scores, input_precision=PRECISION)
        scores = scores * k_scale[None, :] + log_v_scale[None, :]
        is_visible = key[None, :] <= last_visible
        if WINDOW:
            is_visible = is_visible & (key[None, :] > last_visible - WINDOW)
        scores = tl.where(is_visible, scores, float("-inf"))  # (TILE_ROWS, TILE_KEYS)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True))
        # A row may have seen no key yet: -inf less -inf is no number.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - base)
        weights = tl.exp2(scores - base)
        largest = new_largest
        exponentials = weights * tl.exp2(-log_v_scale)[None, :]
        if SUM_LANES == 1:
            total = total * decay + tl.sum(exponentials, axis=1, keep_dims=True)
        else:
            total = total * decay + exponentials
        sum1 = tl.dot(weights.to(narrow), v1, sum1 * decay, input_precision=PRECISION)
        sum2 = tl.dot(weights.to(narrow), v2, sum2 * decay, input_precision=PRECISION)
    return sum1, sum2, largest, tl.sum(total, axis=1, keep_dims=True)


@triton.jit
def _blocks_of_tile(block_table_ptr, first_key, end_key, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The blocks of a tile's keys and their places there, (TILE_KEYS,) each; `first_key` is a multiple of
    TILE_KEYS. Read once for a block where that divides a tile: then neighbours are known to be in one."""
    in_tile = tl.arange(0, TILE_KEYS)
    if TILE_KEYS % BLOCK_SIZE == 0:
        block = tl.zeros((TILE_KEYS,), tl.int32)
        for index in tl.static_range(TILE_KEYS // BLOCK_SIZE):
            place = first_key // BLOCK_SIZE + index
            block_id = tl.load(block_table_ptr + place, mask=place * BLOCK_SIZE < end_key, other=0)
            block = tl.where(in_tile // BLOCK_SIZE == index, block_id, block)
        return block, in_tile % BLOCK_SIZE
    else:
        key = first_key + in_tile
        block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=key < end_key, other=0)
        return block, key % BLOCK_SIZE


# Four values of a register as float16. A byte of an int8 plus 128 becomes the last bits of 1024.
_WIDEN_INT8: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 t, least;
    xor.b32 t, $2, 0x80808080;
    mov.b32 least, 0x64806480;
    prmt.b32 $0, t, 0x64646464, 0x4140;
    prmt.b32 $1, t, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, least;
    sub.rn.f16x2 $1, $1, least;
    }"""
)
_WIDEN_FP8: tl.constexpr = tl.constexpr(
    """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
# Two pairs of halves ($2, $3) by angles with cosines $4 and sines $5.
_ROTATE: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 t;
    mul.rn.f16x2 t, $3, $5;
    neg.f16x2 t, t;
    fma.rn.f16x2 $0, $2, $4, t;
    mul.rn.f16x2 t, $2, $5;
    fma.rn.f16x2 $1, $3, $4, t;
    }"""
)


@triton.jit
def _widened(x, IS_PURE: tl.constexpr):
    """int8 or fp8 as float16.

    From pure operations the compiler concludes that products are of what was loaded with 8 bits, lays them
    out for that, and reads single bytes: so this is not told to be one, where its pipeline for tcgen05 does
    not need that.
    """
    asm: tl.constexpr = _WIDEN_INT8 if x.dtype == tl.int8 else _WIDEN_FP8
    return tl.inline_asm_elementwise(asm, "=&r,=&r,r", [x], tl.float16, IS_PURE, 4)


@triton.jit
def _rotated(x1, x2, cos, sin):
    """Two halves rotated; all float16."""
    return tl.inline_asm_elementwise(
        _ROTATE, "=&r,=&r,r,r,r,r", [x1, x2, cos, sin], (tl.float16, tl.float16), True, 2
    )


@triton.jit
def _log2(x, PACKED: tl.constexpr):
    """Of floats that are not small; with PTX in one instruction."""
    if PACKED:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)
