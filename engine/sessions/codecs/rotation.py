"""Hadamard rotation of heads: it spreads a channel's outliers over all channels of its block.

A rotated block is near a normal distribution whatever the channels were (QuaRot, arXiv:2404.00456),
which is what a coarse grid needs. The rotation is orthonormal: errors keep their size through it.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 16


def block_size(head_dim: int) -> int:
    """Channels that are rotated together: the largest power of two up to 128 that divides
    `head_dim`; 16, with zeros behind the head, where that would be less."""
    return min(_LARGEST_BLOCK, max(_SMALLEST_BLOCK, head_dim & -head_dim))


def num_blocks(head_dim: int) -> int:
    """Blocks of a head; the last one may be filled up with zeros."""
    return -(-head_dim // block_size(head_dim))


def rotate(x: Tensor) -> Tensor:
    """float32 (..., head_dim) -> (..., num_blocks, block_size)."""
    size = block_size(x.shape[-1])
    padded = F.pad(x, (0, num_blocks(x.shape[-1]) * size - x.shape[-1]))
    return padded.unflatten(-1, (-1, size)) @ _hadamard(size, x.device)


def rotate_back(blocks: Tensor, head_dim: int) -> Tensor:
    """The inverse of `rotate`."""
    return (blocks @ _hadamard(blocks.shape[-1], blocks.device)).flatten(-2)[..., :head_dim]


@functools.cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    """The orthonormal, symmetric Hadamard matrix (Sylvester's)."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    return matrix / size**0.5
