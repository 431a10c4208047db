"""Quantised matrices as they lie in GPU memory: GGUF's blocks, repacked so that reads are coalesced.

GGUF interleaves the scales and bits of a block (18 to 210 bytes), which no GPU reads well. Here each
kind of field is a plane of its own, one row of the plane for each row of the matrix. Thirty-two
neighbouring weights of a row make a *lane*, and four neighbouring weights of a lane a *quad*: one shift
and one mask of a word give the integers of a quad, a byte each, as GPUs multiply them four at a time.

| plane          | dtype, columns (K weights in a row)                | types                     |
|----------------|----------------------------------------------------|---------------------------|
| low            | int32; K / 16, K / 8, K / 4 of 2, 4, 8 bits        | all                       |
| high           | int32; K / 32, K / 16 of 1, 2 bits                 | Q3_K Q5_0 Q5_1 Q5_K; Q6_K |
| scales         | float16 (MXFP4: uint8), K / 32, with groups K / 256 | all                      |
| minimums       | float16, as scales                                 | Q4_1 Q5_1 Q2_K Q4_K Q5_K  |
| group_scales   | int8, K / 16 or K / 32                             | Q2_K to Q6_K              |
| group_minimums | int8, as group_scales                              | Q2_K Q4_K Q5_K            |

A word holds b bits each of 8 / b quads: of the quad with index i in the word, weight k lies at bit
8 * k + b * i. MXFP4 has quads one after the other, at bit 16 * i + 4 * k: a table is looked up by nibbles.
The 4-bit and 6-bit scales of K-types take a byte each here: 256 weights of Q4_K grow from 144 to 148
bytes, of Q5_K from 176 to 180, of Q3_K from 110 to 114, of Q2_K from 84 to 100; all others keep their size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from dayshift.engine.quant.dequantize import BlockFields, split_blocks, weights_of

Q = GGMLQuantizationType
LANE = 32  # weights
QUAD = 4  # weights
_CHUNK_BLOCKS = 1 << 16  # blocks repacked at once


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the integers of a type lie in their planes."""

    low_bits: Literal[2, 4, 8]
    high_bits: Literal[0, 1, 2]
    group: Literal[16, 32]


FORMATS = {
    Q.Q4_0: PackedFormat(4, 0, 32),
    Q.Q4_1: PackedFormat(4, 0, 32),
    Q.Q5_0: PackedFormat(4, 1, 32),
    Q.Q5_1: PackedFormat(4, 1, 32),
    Q.Q8_0: PackedFormat(8, 0, 32),
    Q.Q2_K: PackedFormat(2, 0, 16),
    Q.Q3_K: PackedFormat(2, 1, 16),
    Q.Q4_K: PackedFormat(4, 0, 32),
    Q.Q5_K: PackedFormat(4, 1, 32),
    Q.Q6_K: PackedFormat(4, 2, 16),
    Q.MXFP4: PackedFormat(4, 0, 32),
}
_GROWTH = {Q.Q2_K: 16, Q.Q3_K: 4, Q.Q4_K: 4, Q.Q5_K: 4}  # bytes of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedMatrix:
    """A quantised matrix, or the matrices of all experts one below the other; planes as above."""

    quant_type: GGMLQuantizationType
    num_experts: int | None  # None: one matrix
    num_rows: int  # of one matrix
    num_columns: int
    low: Tensor
    high: Tensor | None
    scales: Tensor
    minimums: Tensor | None
    group_scales: Tensor | None
    group_minimums: Tensor | None

    @property
    def format(self) -> PackedFormat:
        """Bits and groups."""
        return FORMATS[self.quant_type]

    @property
    def is_cuda(self) -> bool:
        """It lies in GPU memory."""
        return self.low.is_cuda

    @property
    def num_bytes(self) -> int:
        """Memory of all planes."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes if plane is not None)

    @property
    def planes(self) -> tuple[Tensor | None, ...]:
        """All planes, each (num_experts * num_rows, columns)."""
        return (
            self.low,
            self.high,
            self.scales,
            self.minimums,
            self.group_scales,
            self.group_minimums,
        )

    def expert(self, index: int) -> PackedMatrix:
        """One expert's matrix, a view."""
        rows = slice(index * self.num_rows, (index + 1) * self.num_rows)
        parts = [None if plane is None else plane[rows] for plane in self.planes]
        return _matrix(self.quant_type, None, self.num_rows, self.num_columns, parts)


def pack(raw: Tensor, quant_type: GGMLQuantizationType) -> PackedMatrix:
    """Repack rows as a GGUF file holds them, uint8 (num_rows, bytes of a row) or (num_experts, ...).

    Raises KeyError for a type that is not in `FORMATS`.
    """
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    num_columns = raw.shape[-1] // block_bytes * block_size
    rows = raw.reshape(-1, raw.shape[-1])
    rows_at_once = max(1, _CHUNK_BLOCKS * block_size // num_columns)
    chunks = [_pack_rows(chunk, quant_type) for chunk in rows.split(rows_at_once)]
    planes = [None if parts[0] is None else torch.cat(parts) for parts in zip(*chunks, strict=True)]
    num_experts = raw.shape[0] if raw.dim() == 3 else None
    return _matrix(quant_type, num_experts, raw.shape[-2], num_columns, planes)


def below(first: PackedMatrix, second: PackedMatrix) -> PackedMatrix:
    """One matrix of the rows of two of the same type; of experts, each expert's rows of both."""
    num_matrices = first.num_experts or 1
    planes = [
        None
        if upper is None or lower is None
        else torch.cat(
            [plane.view(num_matrices, -1, plane.shape[1]) for plane in (upper, lower)], dim=1
        ).flatten(0, 1)
        for upper, lower in zip(first.planes, second.planes, strict=True)
    ]
    num_rows = first.num_rows + second.num_rows
    return _matrix(first.quant_type, first.num_experts, num_rows, first.num_columns, planes)


def packed_bytes(num_weights: int, quant_type: GGMLQuantizationType) -> int:
    """Memory of so many weights, packed."""
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    return num_weights // block_size * (block_bytes + _GROWTH.get(quant_type, 0))


def unpack(matrix: PackedMatrix) -> Tensor:
    """float32 (num_rows, num_columns) or (num_experts, num_rows, num_columns): equal to `dequantize`."""
    block_size, _ = GGML_QUANT_SIZES[matrix.quant_type]

    def of_blocks(plane: Tensor | None) -> Tensor | None:
        return None if plane is None else plane.reshape(-1, plane.shape[1] * block_size // matrix.num_columns)

    scale = of_blocks(matrix.scales)
    assert scale is not None
    fields = BlockFields(
        q=integers(matrix).view(-1, block_size),
        scale=scale,
        minimum=of_blocks(matrix.minimums),
        group_scales=of_blocks(matrix.group_scales),
        group_minimums=of_blocks(matrix.group_minimums),
    )
    experts = () if matrix.num_experts is None else (matrix.num_experts,)
    return weights_of(fields, matrix.quant_type).view(*experts, matrix.num_rows, matrix.num_columns)


def _matrix(
    quant_type: GGMLQuantizationType,
    num_experts: int | None,
    num_rows: int,
    num_columns: int,
    planes: list[Tensor | None],
) -> PackedMatrix:
    low, high, scales, minimums, group_scales, group_minimums = planes
    assert low is not None
    assert scales is not None
    return PackedMatrix(
        quant_type=quant_type,
        num_experts=num_experts,
        num_rows=num_rows,
        num_columns=num_columns,
        low=low,
        high=high,
        scales=scales,
        minimums=minimums,
        group_scales=group_scales,
        group_minimums=group_minimums,
    )


def _pack_rows(raw: Tensor, quant_type: GGMLQuantizationType) -> tuple[Tensor | None, ...]:
    form, num_rows = FORMATS[quant_type], len(raw)
    fields = split_blocks(raw.reshape(-1, GGML_QUANT_SIZES[quant_type][1]), quant_type)
    q = fields.q.view(num_rows, -1)

    def of_rows(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.reshape(num_rows, -1)

    return (
        _words(q & (1 << form.low_bits) - 1, _places(form.low_bits, quant_type)),
        _words(q >> form.low_bits, _places(form.high_bits, quant_type)) if form.high_bits else None,
        of_rows(fields.scale),
        of_rows(fields.minimum),
        of_rows(fields.group_scales),
        of_rows(fields.group_minimums),
    )


def integers(matrix: PackedMatrix) -> Tensor:
    """uint8 (num_rows of all experts, num_columns), in the order of the weights."""
    form = matrix.format
    q = _fields(matrix.low, form.low_bits, _places(form.low_bits, matrix.quant_type))
    if matrix.high is not None:
        high = _fields(matrix.high, form.high_bits, _places(form.high_bits, matrix.quant_type))
        q = q | high << form.low_bits
    return q


def _places(num_bits: int, quant_type: GGMLQuantizationType) -> Tensor:
    """Where the weights of a word lie in it: bits (quads in a word, QUAD)."""
    of_weight, of_quad = (4, 16) if quant_type == Q.MXFP4 else (8, num_bits)
    return of_quad * torch.arange(8 // num_bits).unsqueeze(1) + of_weight * torch.arange(QUAD)


def _words(q: Tensor, places: Tensor) -> Tensor:
    """uint8 (num_rows, num_columns) -> int32 (num_rows, words)."""
    of_words = q.view(len(q), -1, *places.shape).long() << places.to(q.device)
    return of_words.sum((-2, -1)).to(torch.int32)


def _fields(words: Tensor, num_bits: int, places: Tensor) -> Tensor:
    """int32 (num_rows, words) -> uint8 (num_rows, num_columns)."""
    fields = words.unsqueeze(-1).unsqueeze(-1) >> places.to(words.device) & (1 << num_bits) - 1
    return fields.to(torch.uint8).flatten(1)
