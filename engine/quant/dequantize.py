"""GGUF's quantised formats to float32, on the device where the bytes lie.

A row of a quantised matrix is a row of blocks; a block holds a few scales and the packed bits of 32
or 256 weights. Layouts: ggml-common.h of llama.cpp. Every operation is done in the order of the
`gguf` package, so that results equal its results bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

_CHUNK_BLOCKS = 1 << 14  # blocks unpacked at once: intermediate results stay within some ten MiB
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled


def dequantize(raw: Tensor, quant_type: GGMLQuantizationType) -> Tensor:
    """uint8 (..., bytes of a row) -> float32 (..., weights of a row).

    Raises KeyError for a type that is not in `SUPPORTED_TYPES`.
    """
    unpack = _UNPACKERS[quant_type]
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    blocks = raw.reshape(-1, block_bytes)
    weights = torch.empty(blocks.shape[0], block_size, dtype=torch.float32, device=raw.device)
    for out, chunk in zip(weights.split(_CHUNK_BLOCKS), blocks.split(_CHUNK_BLOCKS), strict=True):
        out.copy_(unpack(chunk).view(out.shape))
    return weights.view(*raw.shape[:-1], raw.shape[-1] // block_bytes * block_size)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    d, qs = blocks.split([2, 16], dim=1)
    return _f16(d) * (_bits(qs, 1, (0, 4), 0x0F).view(-1, 32).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    d, m, qs = blocks.split([2, 2, 16], dim=1)
    return _f16(d) * _bits(qs, 1, (0, 4), 0x0F).view(-1, 32).float() + _f16(m)


def _q5_0(blocks: Tensor) -> Tensor:
    d, high, qs = blocks.split([2, 4, 16], dim=1)
    return _f16(d) * (_five_bits(high, qs) - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    d, m, high, qs = blocks.split([2, 2, 4, 16], dim=1)
    return _f16(d) * _five_bits(high, qs) + _f16(m)


def _q8_0(blocks: Tensor) -> Tensor:
    d, qs = blocks.split([2, 32], dim=1)
    return qs.view(torch.int8).float() * _f16(d)


def _q2_k(blocks: Tensor) -> Tensor:
    scales, qs, d, d_min = blocks.split([16, 64, 2, 2], dim=1)
    scale = (_f16(d) * (scales & 0x0F).float()).unsqueeze(2)  # (num_blocks, 16, 1)
    minimum = (_f16(d_min) * (scales >> 4).float()).unsqueeze(2)
    q = _bits(qs, 2, (0, 2, 4, 6), 0x03).view(-1, 16, 16)
    return scale * q.float() - minimum


def _q3_k(blocks: Tensor) -> Tensor:
    high, qs, scales, d = blocks.split([32, 64, 12, 2], dim=1)
    low_bits = _bits(scales[:, :8], 1, (0, 4), 0x0F).view(-1, 16)
    high_bits = _bits(scales[:, 8:], 1, (0, 2, 4, 6), 0x03).view(-1, 16)
    scale = (_f16(d) * ((low_bits | high_bits << 4).float() - 32)).unsqueeze(2)  # (num_blocks, 16, 1)
    q = _bits(qs, 2, (0, 2, 4, 6), 0x03).view(-1, 16, 16).float()
    is_low = 1 - _bits(high, 1, tuple(range(8)), 0x01).view(-1, 16, 16).float()  # a set bit: no offset
    return scale * (q - 4 * is_low)


def _q4_k(blocks: Tensor) -> Tensor:
    d, d_min, scales, qs = blocks.split([2, 2, 12, 128], dim=1)
    scale, minimum = _k_scales(d, d_min, scales)
    return scale * _bits(qs, 4, (0, 4), 0x0F).view(-1, 8, 32).float() - minimum


def _q5_k(blocks: Tensor) -> Tensor:
    d, d_min, scales, high, qs = blocks.split([2, 2, 12, 32, 128], dim=1)
    scale, minimum = _k_scales(d, d_min, scales)
    low_bits = _bits(qs, 4, (0, 4), 0x0F).view(-1, 8, 32)
    high_bits = _bits(high, 1, tuple(range(8)), 0x01).view(-1, 8, 32)
    return scale * (low_bits | high_bits << 4).float() - minimum


def _q6_k(blocks: Tensor) -> Tensor:
    low, high, scales, d = blocks.split([128, 64, 16, 2], dim=1)
    scale = (_f16(d) * scales.view(torch.int8).float()).unsqueeze(2)  # (num_blocks, 16, 1)
    low_bits = _bits(low, 2, (0, 4), 0x0F).view(-1, 16, 16)
    high_bits = _bits(high, 2, (0, 2, 4, 6), 0x03).view(-1, 16, 16)
    return scale * ((low_bits | high_bits << 4).float() - 32)


def _mxfp4(blocks: Tensor) -> Tensor:
    exponent, qs = blocks.split([1, 16], dim=1)
    exponent = exponent.to(torch.int32)
    # 2 ** (exponent - 128) as float32 bits: half of e8m0's scale, since the values are doubled.
    bits = torch.where(exponent < 2, 0x0020_0000 << exponent.clamp(max=1), (exponent - 1) << 23)
    values = torch.tensor(_MXFP4_VALUES, dtype=torch.float32, device=blocks.device)
    return bits.view(torch.float32) * values[_bits(qs, 1, (0, 4), 0x0F).view(-1, 32).int()]


def _f16(scale: Tensor) -> Tensor:
    """(num_blocks, 2) bytes -> float32 (num_blocks, 1)."""
    return scale.contiguous().view(torch.float16).float()


def _bits(packed: Tensor, num_groups: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Bit fields of each group of bytes, the first field of all of a group's bytes first.

    (num_blocks, num_bytes) -> uint8 (num_blocks, num_groups, len(shifts), num_bytes / num_groups).
    """
    shift = torch.tensor(shifts, dtype=torch.uint8, device=packed.device).view(-1, 1)
    return packed.reshape(packed.shape[0], num_groups, 1, -1) >> shift & mask


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Low nibbles, and fifth bits in order of the weights -> float32 (num_blocks, 32)."""
    shift = torch.arange(8, dtype=torch.uint8, device=high.device)
    high_bits = (high.unsqueeze(2) >> shift & 1).view(-1, 32)
    return (_bits(low, 1, (0, 4), 0x0F).view(-1, 32) | high_bits << 4).float()


def _k_scales(d: Tensor, d_min: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the eight parts of a Q4_K or Q5_K block, float32 (num_blocks, 8, 1) each.

    Both are 6 bits; the upper two of parts 4 to 7 lie above those of parts 0 to 3.
    """
    first, second, third = scales.split(4, dim=1)
    scale = torch.cat((first & 0x3F, third & 0x0F | first >> 2 & 0x30), dim=1)
    minimum = torch.cat((second & 0x3F, third >> 4 | second >> 2 & 0x30), dim=1)
    return (_f16(d) * scale.float()).unsqueeze(2), (_f16(d_min) * minimum.float()).unsqueeze(2)


_UNPACKERS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.F32: _f32,
    GGMLQuantizationType.F16: _f16,
    GGMLQuantizationType.BF16: _bf16,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.MXFP4: _mxfp4,
}
SUPPORTED_TYPES = tuple(_UNPACKERS)
