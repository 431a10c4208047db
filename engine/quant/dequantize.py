"""GGUF's quantised formats: a block's bytes → its fields → float32, on the device where the bytes lie.

A row of a quantised matrix is a row of blocks; a block holds a few scales and the packed bits of 32
or 256 weights. Layouts: ggml-common.h of llama.cpp. Every operation is done in the order of the
`gguf` package, so that results equal its results bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

_CHUNK_BLOCKS = 1 << 14  # blocks unpacked at once: intermediate results stay within some ten MiB
_MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFields:
    """Blocks taken apart. A weight is scale * (q - offset) - minimum.

    With groups, scale and minimum are those of the block times those of the weight's group. In MXFP4
    `q` are the bits of 4-bit floats, and the scale is an exponent.
    """

    q: Tensor  # uint8 (num_blocks, block_size), in the order of the weights
    scale: Tensor  # float16 (num_blocks, 1); MXFP4: uint8
    minimum: Tensor | None = None  # float16 (num_blocks, 1)
    group_scales: Tensor | None = None  # int8 (num_blocks, num_groups)
    group_minimums: Tensor | None = None  # int8 (num_blocks, num_groups)


def dequantize(raw: Tensor, quant_type: GGMLQuantizationType) -> Tensor:
    """uint8 (..., bytes of a row) -> float32 (..., weights of a row).

    Raises KeyError for a type that is not in `SUPPORTED_TYPES`.
    """
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    blocks = raw.reshape(-1, block_bytes)
    weights = torch.empty(blocks.shape[0], block_size, dtype=torch.float32, device=raw.device)
    for out, chunk in zip(weights.split(_CHUNK_BLOCKS), blocks.split(_CHUNK_BLOCKS), strict=True):
        if quant_type in _FLOATS:
            out.copy_(chunk.contiguous().view(_FLOATS[quant_type]))
        else:
            out.copy_(weights_of(split_blocks(chunk, quant_type), quant_type))
    return weights.view(*raw.shape[:-1], raw.shape[-1] // block_bytes * block_size)


def split_blocks(blocks: Tensor, quant_type: GGMLQuantizationType) -> BlockFields:
    """uint8 (num_blocks, bytes of a block) taken apart. Raises KeyError for a type without blocks."""
    return _SPLITTERS[quant_type](blocks)


def weights_of(fields: BlockFields, quant_type: GGMLQuantizationType) -> Tensor:
    """float32 (num_blocks, block_size)."""
    if quant_type == GGMLQuantizationType.MXFP4:
        values = torch.tensor(_MXFP4_VALUES, dtype=torch.float32, device=fields.q.device)
        return _half_power_of_two(fields.scale) * values[fields.q.int()]
    scale = _of_groups(fields.scale, fields.group_scales)  # (num_blocks, num_groups, 1)
    q = fields.q.view(*scale.shape[:2], -1).float()
    weights = scale * (q - OFFSETS.get(quant_type, 0))
    if fields.minimum is not None:
        weights = weights - _of_groups(fields.minimum, fields.group_minimums)
    return weights.view(fields.q.shape)


def _of_groups(of_block: Tensor, of_groups: Tensor | None) -> Tensor:
    wide = of_block.float() if of_groups is None else of_block.float() * of_groups.float()
    return wide.unsqueeze(2)


def _half_power_of_two(exponent: Tensor) -> Tensor:
    """2 ** (exponent - 128), from its bits: half of e8m0's scale, since the values are doubled."""
    wide = exponent.to(torch.int32)
    bits = torch.where(wide < 2, 0x0020_0000 << wide.clamp(max=1), (wide - 1) << 23)
    return bits.view(torch.float32)


def _q4_0(blocks: Tensor) -> BlockFields:
    d, qs = blocks.split([2, 16], dim=1)
    return BlockFields(q=_bits(qs, 1, (0, 4), 0x0F), scale=_f16(d))


def _q4_1(blocks: Tensor) -> BlockFields:
    d, m, qs = blocks.split([2, 2, 16], dim=1)
    return BlockFields(q=_bits(qs, 1, (0, 4), 0x0F), scale=_f16(d), minimum=-_f16(m))


def _q5_0(blocks: Tensor) -> BlockFields:
    d, high, qs = blocks.split([2, 4, 16], dim=1)
    return BlockFields(q=_five_bits(high, qs), scale=_f16(d))


def _q5_1(blocks: Tensor) -> BlockFields:
    d, m, high, qs = blocks.split([2, 2, 4, 16], dim=1)
    return BlockFields(q=_five_bits(high, qs), scale=_f16(d), minimum=-_f16(m))


def _q8_0(blocks: Tensor) -> BlockFields:
    d, qs = blocks.split([2, 32], dim=1)
    return BlockFields(q=qs ^ 0x80, scale=_f16(d))  # signed, plus 128


def _q2_k(blocks: Tensor) -> BlockFields:
    scales, qs, d, d_min = blocks.split([16, 64, 2, 2], dim=1)
    return BlockFields(
        q=_bits(qs, 2, (0, 2, 4, 6), 0x03),
        scale=_f16(d),
        minimum=_f16(d_min),
        group_scales=(scales & 0x0F).view(torch.int8),
        group_minimums=(scales >> 4).view(torch.int8),
    )


def _q3_k(blocks: Tensor) -> BlockFields:
    high, qs, scales, d = blocks.split([32, 64, 12, 2], dim=1)
    low_bits = _bits(scales[:, :8], 1, (0, 4), 0x0F)
    high_bits = _bits(scales[:, 8:], 1, (0, 2, 4, 6), 0x03)
    q = _bits(qs, 2, (0, 2, 4, 6), 0x03) | _bits(high, 1, tuple(range(8)), 0x01) << 2
    group_scales = (low_bits | high_bits << 4).view(torch.int8) - 32
    return BlockFields(q=q, scale=_f16(d), group_scales=group_scales)


def _q4_k(blocks: Tensor) -> BlockFields:
    d, d_min, scales, qs = blocks.split([2, 2, 12, 128], dim=1)
    return _with_k_scales(_bits(qs, 4, (0, 4), 0x0F), d, d_min, scales)


def _q5_k(blocks: Tensor) -> BlockFields:
    d, d_min, scales, high, qs = blocks.split([2, 2, 12, 32, 128], dim=1)
    q = _bits(qs, 4, (0, 4), 0x0F) | _bits(high, 1, tuple(range(8)), 0x01) << 4
    return _with_k_scales(q, d, d_min, scales)


def _q6_k(blocks: Tensor) -> BlockFields:
    low, high, scales, d = blocks.split([128, 64, 16, 2], dim=1)
    q = _bits(low, 2, (0, 4), 0x0F) | _bits(high, 2, (0, 2, 4, 6), 0x03) << 4
    return BlockFields(q=q, scale=_f16(d), group_scales=scales.contiguous().view(torch.int8))


def _mxfp4(blocks: Tensor) -> BlockFields:
    exponent, qs = blocks.split([1, 16], dim=1)
    return BlockFields(q=_bits(qs, 1, (0, 4), 0x0F), scale=exponent)


def _f16(scale: Tensor) -> Tensor:
    """(num_blocks, 2) bytes -> float16 (num_blocks, 1)."""
    return scale.contiguous().view(torch.float16)


def _bits(packed: Tensor, num_groups: int, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Bit fields of each group of bytes, the first field of all of a group's bytes first.

    (num_blocks, num_bytes) -> uint8 (num_blocks, num_bytes * len(shifts)).
    """
    shift = torch.tensor(shifts, dtype=torch.uint8, device=packed.device).view(-1, 1)
    return (packed.reshape(packed.shape[0], num_groups, 1, -1) >> shift & mask).flatten(1)


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """Low nibbles, and fifth bits in order of the weights -> uint8 (num_blocks, 32)."""
    shift = torch.arange(8, dtype=torch.uint8, device=high.device)
    high_bits = (high.unsqueeze(2) >> shift & 1).view(-1, 32)
    return _bits(low, 1, (0, 4), 0x0F) | high_bits << 4


def _with_k_scales(q: Tensor, d: Tensor, d_min: Tensor, scales: Tensor) -> BlockFields:
    """Scale and minimum of the eight groups of a Q4_K or Q5_K block.

    Both are 6 bits; the upper two of groups 4 to 7 lie above those of groups 0 to 3.
    """
    first, second, third = scales.split(4, dim=1)
    scale = torch.cat((first & 0x3F, third & 0x0F | first >> 2 & 0x30), dim=1)
    minimum = torch.cat((second & 0x3F, third >> 4 | second >> 2 & 0x30), dim=1)
    return BlockFields(
        q=q,
        scale=_f16(d),
        minimum=_f16(d_min),
        group_scales=scale.view(torch.int8),
        group_minimums=minimum.view(torch.int8),
    )


OFFSETS = {
    GGMLQuantizationType.Q4_0: 8,
    GGMLQuantizationType.Q5_0: 16,
    GGMLQuantizationType.Q8_0: 128,
    GGMLQuantizationType.Q3_K: 4,
    GGMLQuantizationType.Q6_K: 32,
}
"""What is taken from the integers of a type; 0 of those that are not here."""

_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_SPLITTERS: dict[GGMLQuantizationType, Callable[[Tensor], BlockFields]] = {
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
BLOCK_TYPES = tuple(_SPLITTERS)
SUPPORTED_TYPES = (*_FLOATS, *BLOCK_TYPES)
