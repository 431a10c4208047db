"""Four bits a value: heads rotated, then an even grid of 16 levels for each group of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from dayshift.engine.quant.kv import SCALE_DTYPE
from dayshift.engine.sessions.codecs.packing import (
    LARGEST_FLOAT32,
    Part,
    dims_of,
    join_parts,
    pack_nibbles,
    split_parts,
    unpack_nibbles,
)
from dayshift.engine.sessions.codecs.rotation import block_size, num_blocks, rotate, rotate_back
from dayshift.engine.sessions.record_format import KVDims

_LARGEST_GROUP = 32


class Rotated4Codec:
    """Scales (2, layers, tokens, heads, groups) in bfloat16, then nibbles (..., groups, group / 2).

    A rotated value lies in the middle of one of 16 steps of size s = max|group| / 7.5 around zero:
    x = (nibble - 7.5) * s.
    """

    limit = LARGEST_FLOAT32 / 16  # the sums of a rotation stay finite

    def parts(self, dims: KVDims, dtype: torch.dtype) -> tuple[Part, ...]:
        *rows, head_dim = dims
        size = block_size(head_dim)
        group = min(_LARGEST_GROUP, size)
        num_groups = num_blocks(head_dim) * size // group
        return (
            Part(SCALE_DTYPE, (*rows, num_groups)),
            Part(torch.uint8, (*rows, num_groups, group // 2)),
        )

    def encode(self, kv: Tensor) -> Tensor:
        parts = self.parts(dims_of(kv), kv.dtype)
        rotated = rotate(kv.float()).flatten(-2)
        groups = rotated.unflatten(-1, (parts[0].shape[-1], -1))
        scales = (groups.abs().amax(-1) / 7.5).to(SCALE_DTYPE)
        divisors = torch.where(scales == 0, 1.0, scales.float()).unsqueeze(-1)
        codes = (groups / divisors + 8).floor_().clamp_(0, 15).to(torch.uint8)
        return join_parts(parts, [scales, pack_nibbles(codes)])

    def decode(self, payload: Tensor, dims: KVDims, dtype: torch.dtype, out: Tensor) -> None:
        scales, packed = split_parts(self.parts(dims, dtype), payload)
        groups = (unpack_nibbles(packed).float() - 7.5) * scales.float().unsqueeze(-1)
        blocks = groups.flatten(-2).unflatten(-1, (-1, block_size(dims[-1])))
        out.copy_(rotate_back(blocks, dims[-1]))
