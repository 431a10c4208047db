"""Keys and values as int8 or fp8, one scale per token and head: for KV at rest and in the pool.

A pool of quantised KV is bytes, (..., num_blocks, block_size, kv_heads, head_dim + SCALE_BYTES): the shape
says what a token and a head take. Within a block all values come first, (block_size, kv_heads, head_dim),
and their scales behind them, (kv_heads, block_size): so a head's values are aligned as its loads need it,
and the scales of a run of its keys lie in a row. A pool's dtype says what its values are: int8, or uint8
for fp8 (e4m3).

q = round(x / s) with s = max|x| / q_max over the head dimension, rounded to bfloat16, which has
float32's range. Quantising what `dequantize_kv` returned in float32 gives the same bytes again.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
SCALE_BYTES = SCALE_DTYPE.itemsize
POOL_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}  # of a pool of quantised KV
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_VALUE_DTYPES = {torch.int8: torch.int8, torch.uint8: torch.float8_e4m3fn}  # by the pool's dtype


def quantize_kv(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise finite floats (..., head_dim) to `dtype`, int8 or float8_e4m3fn.

    Returns:
        q (..., head_dim) and its scales (...), bfloat16. A row of zeros has scale 0.
        |x - q * s| <= s / 2 for int8, and |x| / 16 + s / 512 for fp8.
    """
    largest = _LARGEST[dtype]
    wide = x.float()
    scale = (wide.abs().amax(-1) / largest).to(SCALE_DTYPE)
    divisor = torch.where(scale == 0, 1.0, scale.float())
    steps = (wide / divisor.unsqueeze(-1)).clamp_(-largest, largest)
    return (steps.round_() if dtype is torch.int8 else steps).to(dtype), scale


def dequantize_kv(q: Tensor, scale: Tensor) -> Tensor:
    """The float32 values (..., head_dim) of `quantize_kv`'s result."""
    return q.float() * scale.float().unsqueeze(-1)


def is_quantized(pool: Tensor) -> bool:
    """Whether a pool of keys or values holds quantised ones."""
    return pool.dtype in _VALUE_DTYPES


def values_dtype(pool: Tensor) -> torch.dtype:
    """Of a quantised pool's values."""
    return _VALUE_DTYPES[pool.dtype]


def read_slots(pool: Tensor, slots: Tensor) -> Tensor:
    """The float32 values of some slots of a quantised pool, slot = block_id * block_size + offset.

    Args:
        pool: (..., num_blocks, block_size, kv_heads, head_dim + SCALE_BYTES) contiguous.
        slots: (num_tokens,) int64.

    Returns:
        (..., num_tokens, kv_heads, head_dim).
    """
    values, scales = _planes(pool)
    block, offset = _block_and_offset(pool, slots)
    q = values[..., block, offset, :, :].view(values_dtype(pool))
    return dequantize_kv(q, scales[..., block, offset, :])


def read_blocks(blocks: Tensor) -> Tensor:
    """The float32 values of all slots of a quantised pool, in their order: (num_slots, kv_heads, head_dim).

    Args:
        blocks: (num_blocks, block_size, kv_heads, head_dim + SCALE_BYTES) contiguous.
    """
    values, scales = _planes(blocks)
    return dequantize_kv(values.view(values_dtype(blocks)), scales).flatten(0, 1)


def write_slots(x: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Quantise floats as `read_slots` returns them into their slots, which are distinct, in place."""
    values, scales = _planes(pool)
    block, offset = _block_and_offset(pool, slots)
    q, scale = quantize_kv(x, values_dtype(pool))
    values[..., block, offset, :, :] = q.view(pool.dtype)
    scales[..., block, offset, :] = scale


def _planes(pool: Tensor) -> tuple[Tensor, Tensor]:
    """Views: values (..., num_blocks, block_size, kv_heads, head_dim) and bfloat16 scales (..., num_blocks,
    block_size, kv_heads)."""
    block_size, num_heads, row_bytes = pool.shape[-3:]
    num_scales = block_size * num_heads
    num_bytes = num_scales * (row_bytes - SCALE_BYTES)
    blocks = pool.view(*pool.shape[:-3], -1)
    values = blocks[..., :num_bytes].unflatten(-1, (block_size, num_heads, -1))
    scales = blocks.view(SCALE_DTYPE)[..., num_bytes // SCALE_BYTES :].unflatten(-1, (num_heads, block_size))
    return values, scales.transpose(-1, -2)


def _block_and_offset(pool: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    block_size = pool.shape[-3]
    return slots // block_size, slots % block_size
