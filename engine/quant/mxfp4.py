"""MXFP4 as gpt-oss folders hold it: 32 4-bit floats share a power of two (OCP Microscaling 1.0)."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

MXFP4 = GGMLQuantizationType.MXFP4


def gguf_rows(blocks: Tensor, scales: Tensor) -> Tensor:
    """The same weights in the bytes of a GGUF file.

    A folder's byte j of a block holds weights 2j and 2j + 1, a GGUF file's weights j and j + 16.

    Args:
        blocks: uint8 (..., num_blocks, 16), the first weight of a pair in the low half.
        scales: uint8 (..., num_blocks), exponents with a bias of 127.

    Returns:
        uint8 (..., num_blocks * 17): of each block the scale, then 16 bytes.
    """
    weights = torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2)  # (..., num_blocks, 32)
    packed = weights[..., :16] | weights[..., 16:] << 4
    return torch.cat((scales.unsqueeze(-1), packed), dim=-1).flatten(-2)
