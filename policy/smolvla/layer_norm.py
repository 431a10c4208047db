"""The layer norm of a residual sum whose biases are kept apart: one pass over memory on CUDA, torch on a CPU.

A residual sum h + W x costs nothing beside the product, whose launch adds onto h; a bias does not fit in.
So h is kept without the biases: their sum up to a layer is the same for every row, and its norm adds it.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous

_TILE_ELEMENTS = 4096  # of a program


def offset_layer_norm(hidden: Tensor, offset: Tensor, norm: nn.LayerNorm) -> Tensor:
    """layer_norm(hidden + offset), summed in float32.

    hidden (…, size), contiguous; offset float32 (size,). Returns hidden's shape and dtype.
    Source: Ba et al., arXiv:1607.06450.
    """
    run = offset_layer_norm_triton if hidden.is_cuda else offset_layer_norm_torch
    return run(hidden, offset, norm.weight, norm.bias, norm.eps)


def offset_layer_norm_torch(
    hidden: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """`offset_layer_norm`."""
    summed = hidden.float() + offset
    return F.layer_norm(summed, weight.shape, weight.float(), bias.float(), eps).to(hidden.dtype)


def offset_layer_norm_triton(
    hidden: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    """`offset_layer_norm`. A program has some rows."""
    size = hidden.shape[-1]
    num_rows = hidden.numel() // size
    y = torch.empty_like(hidden)
    columns = padded(size)
    rows = max(1, _TILE_ELEMENTS // columns)
    _offset_layer_norm[(triton.cdiv(num_rows, rows),)](
        hidden,
        offset,
        weight,
        bias,
        y,
        num_rows,
        eps,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows,
        **overlap_options(hidden.device),
        num_warps=4,
    )
    return y


@triton.jit
def _offset_layer_norm(
    hidden_ptr,
    offset_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_column = column < SIZE
    weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)
    offset = tl.load(offset_ptr + column, mask=is_column, other=0.0)
    place = row[:, None] * SIZE + column[None, :]
    is_inside = (row < num_rows)[:, None] & is_column[None, :]
    narrow = tl.load(hidden_ptr + place, mask=is_inside, other=0.0)
    x = tl.where(is_column[None, :], narrow.to(tl.float32) + offset[None, :], 0.0)
    mean = tl.sum(x, axis=1) / SIZE
    centred = tl.where(is_column[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / SIZE
    y = centred * tl.rsqrt(variance + eps)[:, None] * weight[None, :] + bias[None, :]
    tl.store(y_ptr + place, y.to(narrow.dtype), mask=is_inside)
