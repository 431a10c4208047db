"""Keys and values as int8 or fp8, one scale per token and head: for KV at rest and in the pool.

In the pool a head's row is one array of bytes: its quantised values, then its scale. So all that moves or
copies rows of a pool does so whatever they hold. A pool's dtype says what its rows are: int8 for int8
rows, uint8 for fp8 rows.

q = round(x / s) with s = max|x| / q_max over the head dimension, rounded to bfloat16, which has
float32's range. Quantising what `dequantize_kv` returned in float32 gives the same bytes again.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
SCALE_BYTES = SCALE_DTYPE.itemsize
ROW_DTYPES = {"int8": torch.int8, "fp8": torch.uint8}  # of a pool of quantised rows
_VALUE_DTYPES = {torch.int8: torch.int8, torch.uint8: torch.float8_e4m3fn}  # by the pool's dtype
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


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


def has_quantized_rows(pool: Tensor) -> bool:
    """Whether a pool of keys or values holds quantised rows."""
    return pool.dtype in _VALUE_DTYPES


def pack_rows(x: Tensor, row_dtype: torch.dtype) -> Tensor:
    """Floats (..., head_dim) as the rows of a pool of `row_dtype`: (..., head_dim + SCALE_BYTES)."""
    q, scale = quantize_kv(x, _VALUE_DTYPES[row_dtype])
    return torch.cat((q.view(row_dtype), scale.unsqueeze(-1).view(row_dtype)), dim=-1)


def unpack_rows(rows: Tensor) -> Tensor:
    """The float32 values (..., head_dim) of a pool's rows."""
    q, scale = rows.split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    return dequantize_kv(q.view(_VALUE_DTYPES[rows.dtype]), scale.contiguous().view(SCALE_DTYPE).squeeze(-1))
