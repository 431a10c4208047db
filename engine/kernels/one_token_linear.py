"""Linear layers of one token: a pass over the weight at memory speed. `reference` specifies the ops.

What comes before the product (residual sum and norm) and after it (bias, gated activation) happens in the
same launch, because a launch costs as much as reading 10 MB. The norm's scale is a factor of the product,
sum(w * (r * g / rms)) = sum(w * (r * g)) / rms, so that its sum of squares needs no loop of its own.

A program multiplies rows of the weight by the whole token: sums have one order. Many rows of large weights
are streamed instead (`one_token_stream`). On GPUs that have bulk copies large ones are for `one_token_bulk`.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels import one_token_stream
from dayshift.engine.kernels.activation import gated
from dayshift.engine.kernels.launch import (
    let_next_begin,
    load_inside,
    overlap_options,
    padded,
    wait_for_previous,
)
from dayshift.engine.kernels.tiled_linear import weight_rows
from dayshift.engine.models.config import Activation

_MAX_EARLY_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch cuts the weight."""

    rows: int  # of the weight, for a program
    columns: int  # of the weight, for one turn of its loop
    num_warps: int
    num_turns: int = 1  # that are unrolled: what they read is asked for at once


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    kind: Activation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of one token, normed with its residual if these are given; and the sum of both, or x.

    Shapes and dtypes as in `reference.norm_linear` and `reference.norm_gated_linear`.
    """
    num_weight_rows, size = weight.shape
    if one_token_stream.can_stream(num_weight_rows, size):
        return one_token_stream.multiply(
            x, weight, bias=bias, residual=residual, norm_weight=norm_weight, eps=eps, kind=kind
        )
    num_rows = num_weight_rows // 2 if kind else num_weight_rows
    y = torch.empty((1, num_rows), dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty((1, size), dtype=x.dtype, device=x.device)
    tiles = tiles_for(num_weight_rows, size)
    columns = min(tiles.columns, padded(size))
    _multiply_token[(triton.cdiv(num_weight_rows, tiles.rows),)](
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        weight,
        x if bias is None else bias,
        y,
        summed,
        num_rows,
        eps,
        SIZE=size,
        IS_EVEN=size % columns == 0 and num_weight_rows % tiles.rows == 0,
        # Behind attention, which leaves the memory idle; behind other products it only takes registers.
        IS_EARLY=norm_weight is None and size <= _MAX_EARLY_SIZE,
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        KIND=kind,
        ROWS=tiles.rows,
        COLUMNS=columns,
        TURNS=tiles.num_turns,
        **overlap_options(x.device),
        num_warps=tiles.num_warps,
    )
    return y, summed


def tiles_for(num_weight_rows: int, size: int) -> Tiles:
    """The tiles of a product, as they were fastest on an H200: see docs/engine-speed.md."""
    if size > 4096:
        return Tiles(rows=8, columns=1024, num_warps=4, num_turns=2)
    if num_weight_rows > 8192:
        return Tiles(rows=8, columns=1024, num_warps=4)
    if num_weight_rows > 5120:
        return Tiles(rows=4, columns=1024, num_warps=4)
    return Tiles(rows=4, columns=2048, num_warps=8)


@triton.jit
def _multiply_token(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    summed_ptr,
    num_rows,
    eps,
    SIZE: tl.constexpr,
    IS_EVEN: tl.constexpr,  # no tile reaches beyond the weight
    IS_EARLY: tl.constexpr,  # the first turn's weights are asked for before the kernel in front has ended
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,  # of the gated activation, or None
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """ROWS outputs, half as many of a gated layer: y (num_rows,), summed (SIZE,)."""
    tile = tl.program_id(0)
    row = weight_rows(tile, num_rows, ROWS, KIND)
    is_row = tile * ROWS + tl.arange(0, ROWS) < (num_rows if KIND is None else 2 * num_rows)
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * SIZE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((1, COLUMNS), tl.float32)
    first_column = tl.arange(0, COLUMNS)[None, :]
    if IS_EARLY:
        early = load_inside(weight_row + first_column, is_row[:, None] & (first_column < SIZE), IS_EVEN)
    wait_for_previous(OVERLAPS)
    if IS_EARLY:
        x = load_inside(x_ptr + first_column, first_column < SIZE, IS_EVEN)
        total += early.to(tl.float32) * x.to(tl.float32)
    for start in tl.range(COLUMNS if IS_EARLY else 0, SIZE, COLUMNS, num_stages=1, loop_unroll_factor=TURNS):
        column = start + first_column
        is_column = column < SIZE
        weight = load_inside(weight_row + column, is_row[:, None] & is_column, IS_EVEN)
        x = load_inside(x_ptr + column, is_column, IS_EVEN)
        wide = x.to(tl.float32)
        if HAS_NORM:
            added = load_inside(residual_ptr + column, is_column, IS_EVEN)
            summed = (wide + added.to(tl.float32)).to(x.dtype)
            if tile == 0:
                tl.store(summed_ptr + column, summed, mask=is_column)
            wide = summed.to(tl.float32)
            squares += wide * wide
            wide *= load_inside(norm_ptr + column, is_column, IS_EVEN).to(tl.float32)
        total += weight.to(tl.float32) * wide
    let_next_begin(OVERLAPS)

    out = tl.sum(total, axis=1)
    if HAS_NORM:
        out *= tl.rsqrt(tl.sum(squares) / SIZE + eps)
    if HAS_BIAS:
        out += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)
    narrow = y_ptr.dtype.element_ty
    if KIND is None:
        tl.store(y_ptr + row, out.to(narrow), mask=is_row)
    else:
        # Rounded first, as when the product is stored between the ops.
        gate, up = tl.split(tl.reshape(out.to(narrow).to(tl.float32), (ROWS // 2, 2)))
        row = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        tl.store(y_ptr + row, gated(gate, up, KIND).to(narrow), mask=row < num_rows)
