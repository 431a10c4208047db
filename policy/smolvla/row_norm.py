"""RMS norms whose work is done behind the product that reads them, by the kernel that comes anyhow.

norm(x) W = scale(x) (x W) for each row x, if the norm's weights have been multiplied into W (`weights.py`
does that): so a product may read what is not normed yet, and whatever reads the product scales its rows.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dayshift.engine.kernels.activation import gated
from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous

_COLUMNS = 1024  # of a program


class RowNorm(NamedTuple):
    """A norm that is still due: its input (…, size), contiguous, and its epsilon."""

    x: Tensor
    eps: float

    def scales(self) -> Tensor:
        """1 / sqrt(mean(x²) + eps), float32 (…, 1)."""
        return torch.rsqrt(self.x.float().square().mean(-1, keepdim=True) + self.eps)


def gate_rows(gate_up: Tensor, norm: RowNorm) -> Tensor:
    """silu(gate) * up of the scaled rows (…, 2 * size), the gate in their first half: (…, size)."""
    return (gate_rows_triton if gate_up.is_cuda else gate_rows_torch)(gate_up, norm)


def gate_rows_torch(gate_up: Tensor, norm: RowNorm) -> Tensor:
    """`gate_rows`."""
    gate, up = (gate_up.float() * norm.scales()).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gate_rows_triton(gate_up: Tensor, norm: RowNorm) -> Tensor:
    """`gate_rows`. A program has a part of a row."""
    size, norm_size = gate_up.shape[-1] // 2, norm.x.shape[-1]
    y = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    _gate_rows[(y.numel() // size, triton.cdiv(size, _COLUMNS))](
        gate_up,
        norm.x,
        y,
        size,
        norm.eps,
        NORM_SIZE=norm_size,
        NORM_PAD=padded(norm_size),
        COLUMNS=_COLUMNS,
        **overlap_options(gate_up.device),
        num_warps=4,
    )
    return y


@triton.jit
def row_scale(x_ptr, eps, SIZE: tl.constexpr, PAD: tl.constexpr):
    """`RowNorm.scales` of the row that begins at x_ptr."""
    column = tl.arange(0, PAD)
    x = tl.load(x_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)


@triton.jit
def _gate_rows(
    gate_up_ptr,
    x_ptr,
    y_ptr,
    size,
    eps,
    NORM_SIZE: tl.constexpr,
    NORM_PAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = column < size
    gate_ptr = gate_up_ptr + row * (2 * size) + column
    narrow = tl.load(gate_ptr, mask=is_inside, other=0.0)
    up = tl.load(gate_ptr + size, mask=is_inside, other=0.0)
    scale = row_scale(x_ptr + row * NORM_SIZE, eps, NORM_SIZE, NORM_PAD)
    y = gated(narrow.to(tl.float32) * scale, up.to(tl.float32) * scale, "silu")
    tl.store(y_ptr + row * size + column, y.to(narrow.dtype), mask=is_inside)
