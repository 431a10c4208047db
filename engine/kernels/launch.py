"""What the launchers of the Triton kernels share."""

from __future__ import annotations

import torch


def padded(size: int, least: int = 1) -> int:
    """The next power of two that is not below `size` nor below `least`: a Triton tile's side."""
    return max(least, 1 << (size - 1).bit_length())


def check_pools(k_pool: torch.Tensor, v_pool: torch.Tensor) -> None:
    """Raise ValueError unless slots lie in a row, as the kernels address them."""
    if not (k_pool.is_contiguous() and v_pool.is_contiguous()):
        raise ValueError("the KV pools of a layer must be contiguous")
