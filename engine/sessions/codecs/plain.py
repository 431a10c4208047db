"""Codecs that keep every value as a float."""

from __future__ import annotations

import torch
from torch import Tensor

from dayshift.engine.sessions.codecs.packing import LARGEST_FLOAT32, Part, dims_of, join_parts, split_parts
from dayshift.engine.sessions.record_format import KVDims


class RawCodec:
    """The values as they are in the pool, bit by bit."""

    limit = None

    def parts(self, dims: KVDims, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part(dtype, dims),)

    def encode(self, kv: Tensor) -> Tensor:
        return join_parts(self.parts(dims_of(kv), kv.dtype), [kv])

    def decode(self, payload: Tensor, dims: KVDims, dtype: torch.dtype, out: Tensor) -> None:
        out.copy_(split_parts(self.parts(dims, dtype), payload)[0])


class BFloat16Codec:
    """The values rounded to bfloat16: half a float32 pool; the same as raw for a bfloat16 pool."""

    limit = LARGEST_FLOAT32

    def parts(self, dims: KVDims, dtype: torch.dtype) -> tuple[Part, ...]:
        return (Part(torch.bfloat16, dims),)

    def encode(self, kv: Tensor) -> Tensor:
        return join_parts(self.parts(dims_of(kv), kv.dtype), [kv.to(torch.bfloat16)])

    def decode(self, payload: Tensor, dims: KVDims, dtype: torch.dtype, out: Tensor) -> None:
        out.copy_(split_parts(self.parts(dims, dtype), payload)[0])
