"""Linear layers of a few tokens, bound by reading the weights: one pass over them at memory speed.

Three ops share a kernel. What comes before the product (residual sum and norm) and after it (bias,
gated activation) happens in the same launch, because in a decode step of one sequence a launch costs as
much as reading 10 MB. Steps of more tokens go to cuBLAS, which is bound by arithmetic there.
`reference` specifies every op.

A program owns rows of the weight and the whole length of the product, so that sums have one order: a
token's result depends on nothing but the number of tokens it is padded to.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from dayshift.engine.kernels import activation, norm
from dayshift.engine.kernels.activation import gated
from dayshift.engine.kernels.launch import padded
from dayshift.engine.models.config import Activation

MAX_TOKENS = 16  # beyond it cuBLAS reads the weights as fast, and every program would read too much of x
_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch cuts the weight. Found by `dayshift bench kernels --tune` on an H200."""

    rows: int  # of the weight, for a program
    columns: int  # of the weight, for one turn of its loop
    num_warps: int
    num_stages: int


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x weightᵀ + bias. Shapes and dtypes as in `reference.linear`."""
    if len(x) > MAX_TOKENS:
        return F.linear(x, weight, bias)
    return _launch(x, weight, bias=bias)[0]


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, then `linear`; also the sum. As in `reference.norm_linear`."""
    if len(x) > MAX_TOKENS:
        normed, summed = norm.rms_norm(x, norm_weight, eps, residual)
        return F.linear(normed, weight, bias), summed
    return _launch(x, weight, bias=bias, residual=residual, norm_weight=norm_weight, eps=eps)


def norm_gated_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    kind: Activation = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` of x + residual, `linear`, `gated_activation`; also the sum.

    Shapes and dtypes as in `reference.norm_gated_linear`.
    """
    if len(x) > MAX_TOKENS:
        normed, summed = norm.rms_norm(x, norm_weight, eps, residual)
        return activation.gated_activation(F.linear(normed, gate_up), kind), summed
    return _launch(x, gate_up, residual=residual, norm_weight=norm_weight, eps=eps, kind=kind)


def tiles_for(num_tokens: int, num_rows: int, num_columns: int, *, is_gated: bool) -> Tiles:
    """The tiles of a product: enough programs to fill the GPU twice, each with 16 KiB in a read."""
    largest, least, columns = (16, 1, 512) if num_tokens == 1 else (32, _MIN_DOT, 256)
    rows = min(largest // 2 if is_gated else largest, padded(num_rows // 512))
    return Tiles(
        rows=max(least, rows),
        columns=min(columns, padded(num_columns, _MIN_DOT)),
        num_warps=4,
        num_stages=4 if num_tokens == 1 else 3,
    )


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: Activation | None = None,
    tiles: Tiles | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, size = x.shape
    num_rows = weight.shape[0] // 2 if kind else weight.shape[0]
    y = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    summed = y if residual is None else torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y, summed
    tiles = tiles or tiles_for(num_tokens, num_rows, size, is_gated=kind is not None)
    _few_tokens_linear[(triton.cdiv(num_rows, tiles.rows),)](
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        y,
        summed,
        num_tokens,
        num_rows,
        x.stride(0),
        eps,
        SIZE=size,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        KIND=kind,
        TOKENS=1 if num_tokens == 1 else padded(num_tokens, _MIN_DOT),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        STAGES=tiles.num_stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return y, summed


@triton.jit
def _load_input(x_ptr, residual_ptr, x_stride, column, num_tokens, SIZE, HAS_NORM, TOKENS):
    """(TOKENS, columns) of x, or of x + residual rounded as the sum is kept."""
    token = tl.arange(0, TOKENS)[:, None]
    is_inside = (token < num_tokens) & (column < SIZE)[None, :]
    x = tl.load(x_ptr + token * x_stride + column[None, :], mask=is_inside, other=0.0)
    if HAS_NORM:
        added = tl.load(residual_ptr + token * SIZE + column[None, :], mask=is_inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _few_tokens_linear(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    summed_ptr,
    num_tokens,
    num_rows,
    x_stride,
    eps,
    SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,  # of the gated activation, or None
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS outputs of all tokens: y (num_tokens, num_rows), summed (num_tokens, SIZE).

    With one token the product is an elementwise sum in registers, otherwise tensor cores multiply the
    rows of the weight by the tokens, padded to TOKENS.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    token = tl.arange(0, TOKENS)[:, None]
    scale = tl.zeros((TOKENS, 1), tl.float32) + 1.0
    if HAS_NORM:
        squares = tl.zeros((TOKENS, COLUMNS), tl.float32)
        for start in range(0, SIZE, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            x = _load_input(x_ptr, residual_ptr, x_stride, column, num_tokens, SIZE, HAS_NORM, TOKENS)
            if tl.program_id(0) == 0:
                is_inside = (token < num_tokens) & (column < SIZE)[None, :]
                tl.store(summed_ptr + token * SIZE + column[None, :], x, mask=is_inside)
            wide = x.to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / SIZE + eps)

    if TOKENS == 1:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        total_up = tl.zeros((ROWS, COLUMNS), tl.float32)
    else:
        total = tl.zeros((ROWS, TOKENS), tl.float32)
        total_up = tl.zeros((ROWS, TOKENS), tl.float32)
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * SIZE
    for start in tl.range(0, SIZE, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        is_weight = is_row[:, None] & (column < SIZE)[None, :]
        weight = tl.load(weight_row + column[None, :], mask=is_weight, other=0.0)
        if KIND is not None:
            up_row = weight_row + num_rows.to(tl.int64) * SIZE
            up = tl.load(up_row + column[None, :], mask=is_weight, other=0.0)
        x = _load_input(x_ptr, residual_ptr, x_stride, column, num_tokens, SIZE, HAS_NORM, TOKENS)
        if HAS_NORM:
            norm_weight = tl.load(norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
            x = (x.to(tl.float32) * scale * norm_weight[None, :]).to(x.dtype)
        if TOKENS == 1:
            total += weight.to(tl.float32) * x.to(tl.float32)
            if KIND is not None:
                total_up += up.to(tl.float32) * x.to(tl.float32)
        else:
            total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
            if KIND is not None:
                total_up = tl.dot(up, tl.trans(x), total_up, input_precision=PRECISION)

    if TOKENS == 1:
        total = tl.sum(total, axis=1, keep_dims=True)  # (ROWS, 1)
        total_up = tl.sum(total_up, axis=1, keep_dims=True)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    narrow = y_ptr.dtype.element_ty
    if KIND is not None:
        # Rounded first, as when the product is stored between the ops.
        total = gated(total.to(narrow).to(tl.float32), total_up.to(narrow).to(tl.float32), KIND)
    out = y_ptr + tl.arange(0, TOKENS)[None, :] * num_rows + row[:, None]
    tl.store(out, total.to(narrow), mask=is_row[:, None] & (tl.arange(0, TOKENS)[None, :] < num_tokens))
