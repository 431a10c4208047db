"""Triton kernel of `rms_norm`; `reference.rms_norm` specifies it."""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import overload

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous

_TILE_ELEMENTS = 2048  # short rows, such as attention heads, are normed several to a program


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y = r / sqrt(mean(r²) + eps) * weight with r = x + residual, one pass over memory.

    Shapes and dtypes as in `reference.rms_norm`. A program norms whole rows, so that a row's result
    depends on nothing else. Source: Zhang & Sennrich, arXiv:1910.07467.
    """
    size = x.shape[-1]
    heads = x.unsqueeze(1) if x.dim() == 2 else x
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    summed = y if residual is None else torch.empty_like(y)
    added = heads if residual is None else residual.view(heads.shape)
    num_rows = heads.shape[0] * heads.shape[1]
    if num_rows == 0:
        return y if residual is None else (y, summed)
    columns = padded(size)
    rows = max(1, _TILE_ELEMENTS // columns)
    _rms_norm[(triton.cdiv(num_rows, rows),)](
        heads,
        added,
        weight,
        y,
        summed,
        num_rows,
        heads.shape[1],
        heads.stride(0),
        heads.stride(1),
        added.stride(0),
        added.stride(1),
        eps,
        SIZE=size,
        COLUMNS=columns,
        ROWS=rows,
        HAS_RESIDUAL=residual is not None,
        **overlap_options(x.device),
        num_warps=min(16, max(4, columns * rows // 512)),
    )
    return y if residual is None else (y, summed)


@triton.jit
def _rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    summed_ptr,
    num_rows,
    num_heads,
    x_token_stride,
    x_head_stride,
    residual_token_stride,
    residual_head_stride,
    eps,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = (row // num_heads).to(tl.int64), row % num_heads
    column = tl.arange(0, COLUMNS)[None, :]
    is_inside = (row < num_rows) & (column < SIZE)  # (ROWS, COLUMNS)
    out = row.to(tl.int64) * SIZE + column
    let_next_begin(OVERLAPS)
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)

    x = tl.load(x_ptr + token * x_token_stride + head * x_head_stride + column, mask=is_inside, other=0.0)
    r = x.to(tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(
            residual_ptr + token * residual_token_stride + head * residual_head_stride + column,
            mask=is_inside,
            other=0.0,
        )
        summed = (r + residual.to(tl.float32)).to(x.dtype)
        tl.store(summed_ptr + out, summed, mask=is_inside)
        r = summed.to(tl.float32)

    mean_square = tl.sum(r * r, axis=1, keep_dims=True) / SIZE
    y = r * tl.rsqrt(mean_square + eps) * weight
    tl.store(y_ptr + out, y.to(x.dtype), mask=is_inside)
