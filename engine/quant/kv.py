"""Keys and values as int8 or fp8, one scale per token and head: for KV at rest and in the pool.

q = round(x / s) with s = max|x| / q_max over the head dimension, rounded to bfloat16, which has
float32's range. Quantising what `dequantize_kv` returned in float32 gives the same bytes again.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_DTYPE = torch.bfloat16
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
