"""One byte a value, one scale for each token and head: int8 and fp8 (e4m3)."""

from __future__ import annotations

import torch
from torch import Tensor

from dayshift.engine.quant.kv import SCALE_DTYPE, quantize_kv
from dayshift.engine.sessions.codecs.packing import LARGEST_FLOAT32, Part, dims_of, join_parts, split_parts
from dayshift.engine.sessions.record_format import KVDims


class ScaledCodec:
    """Scales (2, layers, tokens, heads) in bfloat16, then values (..., head_dim).

    Exact for what comes from a pool of the same dtype: quantising it again gives the same bytes.
    """

    limit = LARGEST_FLOAT32

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def parts(self, dims: KVDims, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part(SCALE_DTYPE, dims[:-1]), Part(self._dtype, dims))

    def encode(self, kv: Tensor) -> Tensor:
        values, scales = quantize_kv(kv, self._dtype)
        return join_parts(self.parts(dims_of(kv), kv.dtype), [scales, values])

    def decode(self, payload: Tensor, dims: KVDims, dtype: torch.dtype, out: Tensor) -> None:
        scales, values = split_parts(self.parts(dims, dtype), payload)
        if self._dtype is not torch.int8:
            values = values.to(torch.bfloat16)  # exact; torch multiplies no float8
        # As `dequantize_kv`, in one pass: a restore is bound by the device's memory.
        torch.mul(values, scales.float().unsqueeze(-1), out=out)
