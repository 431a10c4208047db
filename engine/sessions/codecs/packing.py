"""Payloads of several arrays in a row, and values of less than a byte."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dayshift.engine.sessions.record_format import KVDims

LARGEST_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a payload. Wider types come first, so that every part is aligned.

    `layer_axis`, 0 or 1, is that of the layers.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layer_axis: int = 1

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def dims_of(kv: Tensor) -> KVDims:
    """Shape of (2, num_layers, num_tokens, num_kv_heads, head_dim)."""
    keys_and_values, num_layers, num_tokens, num_kv_heads, head_dim = kv.shape
    return keys_and_values, num_layers, num_tokens, num_kv_heads, head_dim


def join_parts(parts: Sequence[Part], tensors: Sequence[Tensor]) -> Tensor:
    """The arrays one after the other, as uint8 (num_bytes,)."""
    for part, tensor in zip(parts, tensors, strict=True):
        assert (part.dtype, part.shape) == (tensor.dtype, tuple(tensor.shape)), (part, tensor.shape)
    return torch.cat([tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def split_parts(parts: Sequence[Part], payload: Tensor) -> list[Tensor]:
    """Views of a payload, one for each part."""
    pieces = payload.split([part.num_bytes for part in parts])
    return [
        piece.view(part.dtype).view(part.shape)
        if len(piece)
        else piece.new_empty(part.shape, dtype=part.dtype)
        for part, piece in zip(parts, pieces, strict=True)
    ]


def ranges_of_layers(parts: Sequence[Part], num_layers: int, layers: range) -> list[tuple[int, int]]:
    """Where in a payload these layers lie, as (start, end) of bytes: the ranges, one after the other, are the
    payload of these layers alone."""
    ranges: list[tuple[int, int]] = []
    part_start = 0
    for part in parts:
        num_runs = part.shape[0] if part.layer_axis else 1
        layer_bytes = part.num_bytes // (num_runs * num_layers)
        for run in range(num_runs if layer_bytes else 0):
            start = part_start + (run * num_layers + layers.start) * layer_bytes
            if ranges and ranges[-1][1] == start:
                start, _ = ranges.pop()
            ranges.append((start, part_start + (run * num_layers + layers.stop) * layer_bytes))
        part_start += part.num_bytes
    return ranges


def pack_nibbles(values: Tensor) -> Tensor:
    """uint8 values below 16 (..., n), n even -> (..., n / 2); the first of a pair is the low half."""
    low, high = values.unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_bits(bits: Tensor) -> Tensor:
    """uint8 zeros and ones (..., n), n a multiple of 8 -> (..., n / 8); the first is the lowest bit."""
    # Eight bytes as one number: the product has byte i's one in bit 56 + i, and carries nothing there.
    eights = bits.contiguous().view(torch.int64)
    return ((eights * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack_bits(packed: Tensor) -> Tensor:
    """The inverse of `pack_bits`."""
    return _bits_of_bytes(packed.device)[packed.int()].flatten(-2)


@functools.cache
def _bits_of_bytes(device: torch.device) -> Tensor:
    """uint8 (256, 8): the bits of each byte, the lowest first."""
    byte = torch.arange(256, device=device).unsqueeze(-1)
    return ((byte >> torch.arange(8, device=device)) & 1).to(torch.uint8)
