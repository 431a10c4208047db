"""A residual sum and the layer norm of it: one pass over memory on CUDA, torch ops on a CPU."""

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


def add_layer_norm(hidden: Tensor, delta: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Add `delta` to `hidden`, in its memory; the layer norm of the sum.

    All (…, size), contiguous, of one dtype. Source: Ba et al., arXiv:1607.06450.
    """
    run = add_layer_norm_triton if hidden.is_cuda else add_layer_norm_torch
    return run(hidden, delta, norm.weight, norm.bias, norm.eps)


def add_layer_norm_torch(hidden: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`add_layer_norm`."""
    return F.layer_norm(hidden.add_(delta), weight.shape, weight, bias, eps)


def add_layer_norm_triton(hidden: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`add_layer_norm`. A program has some rows."""
    size = hidden.shape[-1]
    num_rows = hidden.numel() // size
    y = torch.empty_like(hidden)
    columns = padded(size)
    rows = max(1, _TILE_ELEMENTS // columns)
    _add_layer_norm[(triton.cdiv(num_rows, rows),)](
        hidden,
        delta,
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
def _add_layer_norm(
    hidden_ptr,
    delta_ptr,
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
    place = row[:, None] * SIZE + column[None, :]
    is_inside = (row < num_rows)[:, None] & is_column[None, :]
    narrow = tl.load(hidden_ptr + place, mask=is_inside, other=0.0)
    delta = tl.load(delta_ptr + place, mask=is_inside, other=0.0)
    summed = (narrow.to(tl.float32) + delta.to(tl.float32)).to(narrow.dtype)
    tl.store(hidden_ptr + place, summed, mask=is_inside)
    x = summed.to(tl.float32)
    mean = tl.sum(x, axis=1) / SIZE
    centred = tl.where(is_column[None, :], x - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / SIZE
    y = centred * tl.rsqrt(variance + eps)[:, None] * weight[None, :] + bias[None, :]
    tl.store(y_ptr + place, y.to(narrow.dtype), mask=is_inside)
