"""Quantised KV in the kernels: where a block keeps it, and how a token's is written. See `quant.kv`."""

# Triton writes compile-time constants in capitals, and compiles what follows an `if` that returns.
# ruff: noqa: N803, RET505
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

_SCALE_BYTES: tl.constexpr = tl.constexpr(2)


@triton.jit
def quantized_places(
    block,
    in_block,
    kv_head,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Bytes from a quantised pool's start to the values and to the scale of a head of the tokens
    `in_block` of blocks `block`, int64."""
    num_rows: tl.constexpr = BLOCK_SIZE * NUM_KV_HEADS
    start = block.to(tl.int64) * (num_rows * (2 * HALF + _SCALE_BYTES))
    values = start + (in_block * NUM_KV_HEADS + kv_head) * (2 * HALF)
    scale = start + num_rows * (2 * HALF) + (kv_head * BLOCK_SIZE + in_block) * _SCALE_BYTES
    return values, scale


@triton.jit
def values_of(pool_ptr):
    """A quantised pool's pointer as one to its values, int8 or fp8."""
    if pool_ptr.dtype.element_ty == tl.uint8:
        return pool_ptr.to(tl.pointer_type(tl.float8e4nv))
    else:
        return pool_ptr


@triton.jit
def load_scale(pool_ptr, place, is_token):
    """The scales at a pool's bytes `place`, float32; 0 where there is no token."""
    return tl.load((pool_ptr + place).to(tl.pointer_type(tl.bfloat16)), mask=is_token, other=0.0).to(
        tl.float32
    )


@triton.jit
def store_quantized(
    x1,
    x2,
    pool_ptr,
    slot,
    is_kept,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Quantise the halves (HEADS_PAD, HALF_PAD) of a token's heads, zero outside of them, into its slot."""
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    is_int8: tl.constexpr = pool_ptr.dtype.element_ty == tl.int8
    end: tl.constexpr = 127.0 if is_int8 else 448.0
    largest = tl.max(tl.maximum(tl.abs(wide1), tl.abs(wide2)), axis=1, keep_dims=True)
    bits = tl.div_rn(largest, end).to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # rounded to bfloat16, which the interpreter cuts off
    scale = (bits << 16).to(tl.float32, bitcast=True)
    divisor = tl.where(scale == 0.0, 1.0, scale)
    q1 = _quantize(wide1, divisor, end, is_int8)
    q2 = _quantize(wide2, divisor, end, is_int8)

    values, place = quantized_places(
        slot // BLOCK_SIZE, slot % BLOCK_SIZE, head, NUM_KV_HEADS, HALF, BLOCK_SIZE
    )
    is_inside = is_kept & (head < NUM_KV_HEADS) & (dim < HALF)
    row = values_of(pool_ptr) + values + dim
    tl.store(row, q1, mask=is_inside)
    tl.store(row + HALF, q2, mask=is_inside)
    scale_ptr = (pool_ptr + place).to(tl.pointer_type(tl.int16))
    tl.store(scale_ptr, bits.to(tl.int16), mask=is_kept & (head < NUM_KV_HEADS))


@triton.jit
def _quantize(x, divisor, END: tl.constexpr, IS_INT8: tl.constexpr):
    step = tl.minimum(tl.maximum(tl.div_rn(x, divisor), -END), END)
    if IS_INT8:
        # Half to even: added to 1.5 * 2^23, a number's last bits are the nearest integer's.
        return (step + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        return step.to(tl.float8e4nv)
