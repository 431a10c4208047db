"""Linear layers whose tiles do not depend on the number of tokens: batch-invariant.

A program multiplies some rows of the weight by a tile of tokens over the whole length of the product: a
token's sums have one order, whatever its place in the tile and whatever lies beside it. The tile is as
wide in tokens as reading the weight hides: one token takes hardly longer than it would alone.
`reference.linear` specifies the op.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TOKENS = 64
_MANY_ROWS = 16_384  # of a weight; fewer are cut into narrower tiles, so that all processors get some


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x weightᵀ + bias, any number of tokens. Shapes and dtypes as in `reference.linear`."""
    num_tokens, size = x.shape
    num_rows = weight.shape[0]
    y = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    rows = 64 if num_rows >= _MANY_ROWS else 32
    columns = 256 // x.element_size()
    _multiply_tile[(triton.cdiv(num_tokens, _TOKENS), triton.cdiv(num_rows, rows))](
        x,
        weight,
        weight if bias is None else bias,  # not read
        y,
        num_tokens,
        num_rows,
        x.stride(0),
        SIZE=size,
        HAS_BIAS=bias is not None,
        TOKENS=_TOKENS,
        ROWS=rows,
        COLUMNS=columns,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=4,
    )
    return y


@triton.jit
def _multiply_tile(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    num_tokens,
    num_rows,
    x_stride,
    SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS outputs of TOKENS tokens: y (num_tokens, num_rows)."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_token, is_row = token < num_tokens, row < num_rows
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for start in range(0, SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < SIZE
        weight = tl.load(
            weight_ptr + row[:, None] * SIZE + column[None, :],
            mask=is_row[:, None] & is_column[None, :],
            other=0.0,
        )
        x = tl.load(
            x_ptr + token[:, None] * x_stride + column[None, :],
            mask=is_token[:, None] & is_column[None, :],
            other=0.0,
        )
        total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
    out = y_ptr + token[None, :] * num_rows + row[:, None]
    tl.store(out, total.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])
