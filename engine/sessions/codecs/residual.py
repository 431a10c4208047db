"""Bit planes of residuals, from coarse to fine: at least five times smaller than bfloat16.

1. Keys keep a nearly constant offset in each channel. Of a piece of 32 tokens or more the channels'
   means are taken off the keys and written once, as int8.
2. What is left of each head is rotated (`rotation`), so that it is near a normal distribution, and
   divided by its root mean square, written as a power of 2 ** (1 / 4) in one byte.
3. Each plane holds one bit a value: the half in which it lies of the cell that the planes before
   left. Cells are those of the best 16 levels for a normal distribution (Lloyd, 1957); values are
   read as the means of their cells, so a prefix of the planes is itself a coarser code.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from dayshift.engine.quant.kv import SCALE_DTYPE, dequantize_kv, quantize_kv
from dayshift.engine.sessions.codecs.packing import (
    Part,
    dims_of,
    join_parts,
    pack_bits,
    split_parts,
    unpack_bits,
)
from dayshift.engine.sessions.codecs.rotation import block_size, num_blocks, rotate, rotate_back
from dayshift.engine.sessions.record_format import KVDims

# Errors of keys move the weights of attention, errors of values average out: measured on SmolLM2-135M,
# 4 + 2 planes lose less than 3 + 3.
NUM_KEY_PLANES = 4
NUM_VALUE_PLANES = 2
_MIN_TOKENS_FOR_MEANS = 32
_GAIN_STEPS = 4  # per octave
_GAIN_OF_ONE = 160  # code of the gain 1; code 0 is the gain 0
_FINEST_PLANES = 4
_STEPS_PER_UNIT = 32  # of the table that finds a value's cell


class ResidualCodec:
    """Means of the keys' channels, gains, then the planes of keys and of values in turn."""

    limit = 2.0**22  # gains reach 2 ** 23.75, and a rotated block has the norm of the block

    def parts(self, dims: KVDims, dtype: torch.dtype) -> tuple[Part, ...]:
        _, num_layers, num_tokens, num_kv_heads, head_dim = dims
        rows = (num_layers, num_tokens, num_kv_heads, num_blocks(head_dim))
        has_means = num_tokens >= _MIN_TOKENS_FOR_MEANS
        means = (num_layers, num_kv_heads) if has_means else (0, 0)
        plane = Part(torch.uint8, (*rows, block_size(head_dim) // 8), layer_axis=0)
        return (
            Part(SCALE_DTYPE, means, layer_axis=0),
            Part(torch.int8, (*means, head_dim), layer_axis=0),
            Part(torch.uint8, (2, *rows)),
            *[plane] * (NUM_KEY_PLANES + NUM_VALUE_PLANES),
        )

    def encode(self, kv: Tensor) -> Tensor:
        keys, values = kv.float()
        parts = self.parts(dims_of(kv), kv.dtype)
        means, scales = quantize_kv(keys.mean(1), torch.int8)
        if not parts[0].shape[0]:
            means, scales = means.new_empty(parts[1].shape), scales.new_empty(parts[0].shape)
        else:
            keys = keys - dequantize_kv(means, scales).unsqueeze(1)
        key_gains, key_planes = _encode_rows(keys, NUM_KEY_PLANES)
        value_gains, value_planes = _encode_rows(values, NUM_VALUE_PLANES)
        gains = torch.stack((key_gains, value_gains))
        return join_parts(parts, [scales, means, gains, *key_planes, *value_planes])

    def decode(self, payload: Tensor, dims: KVDims, dtype: torch.dtype, out: Tensor) -> None:
        scales, means, gains, *planes = split_parts(self.parts(dims, dtype), payload)
        head_dim = dims[-1]
        keys = _decode_rows(gains[0], planes[:NUM_KEY_PLANES], head_dim)
        if len(means):
            keys += dequantize_kv(means, scales).unsqueeze(1)
        out[0].copy_(keys)
        out[1].copy_(_decode_rows(gains[1], planes[NUM_KEY_PLANES:], head_dim))


def _encode_rows(x: Tensor, num_planes: int) -> tuple[Tensor, list[Tensor]]:
    """float32 (layers, tokens, heads, head_dim) -> gains (..., blocks), and its planes."""
    blocks = rotate(x)
    octaves = blocks.square().mean(-1).log2() / 2  # -inf for zeros
    gains = (octaves * _GAIN_STEPS + _GAIN_OF_ONE).round().clamp(0, 255).to(torch.uint8)
    unit = torch.exp2((gains.float() - _GAIN_OF_ONE) / _GAIN_STEPS)
    steps = (blocks / unit.unsqueeze(-1) * _STEPS_PER_UNIT + 128).clamp_(0, 255)
    cells = _cell_of_step(x.device)[steps.int()]
    shifts = range(_FINEST_PLANES - 1, _FINEST_PLANES - 1 - num_planes, -1)
    return gains, [pack_bits((cells >> shift) & 1) for shift in shifts]


def _decode_rows(gains: Tensor, planes: list[Tensor], head_dim: int) -> Tensor:
    cells = torch.zeros((), dtype=torch.uint8, device=gains.device)
    for plane in planes:
        cells = (cells << 1) | unpack_bits(plane)
    means = _cell_means(len(planes), gains.device)
    unit = torch.exp2((gains.float() - _GAIN_OF_ONE) / _GAIN_STEPS)
    unit = torch.where(gains == 0, 0.0, unit)
    return rotate_back(means[cells.int()] * unit.unsqueeze(-1), head_dim)


@functools.cache
def _borders() -> tuple[float, ...]:
    """Between the finest cells: Lloyd's for a normal distribution, on whole steps."""
    levels = 2**_FINEST_PLANES
    borders = [NormalDist().inv_cdf(level / levels) for level in range(1, levels)]
    for _ in range(500):
        borders = [(a + b) / 2 for a, b in pairwise(_means_between(borders))]
    return tuple(round(border * _STEPS_PER_UNIT) / _STEPS_PER_UNIT for border in borders)


@functools.cache
def _cell_of_step(device: torch.device) -> Tensor:
    """uint8 (256,): the finest cell of each step; step 128 begins at zero."""
    starts = (torch.arange(256) - 128) / _STEPS_PER_UNIT
    cells = torch.bucketize(starts, torch.tensor(_borders()), right=True)
    return cells.to(device=device, dtype=torch.uint8)


@functools.cache
def _cell_means(num_planes: int, device: torch.device) -> Tensor:
    """float32 (2 ** num_planes,): the mean of each cell; coarser cells are pairs of the next finer."""
    width = 2 ** (_FINEST_PLANES - num_planes)
    return torch.tensor(_means_between(_borders()[width - 1 :: width]), device=device)


def _means_between(borders: Sequence[float]) -> list[float]:
    """Means of the standard normal distribution between consecutive borders, from -inf to inf."""
    normal = NormalDist()
    density = [0.0, *map(normal.pdf, borders), 0.0]
    share = [0.0, *map(normal.cdf, borders), 1.0]
    return [(density[i] - density[i + 1]) / (share[i + 1] - share[i]) for i in range(len(borders) + 1)]
