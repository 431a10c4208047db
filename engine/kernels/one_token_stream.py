"""`one_token_linear` where the weight is large and its rows are short: every program streams many rows.

As many programs as run side by side share all rows evenly. A program holds the token, normed, in registers,
and asks for the next rows before it multiplies by the ones that it has; its first rows are on their way
before the kernel in front has ended. Four programs fill a processor's registers, so that those of the next
kernel, which take their places while these end, are spread evenly, too.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.activation import gated
from dayshift.engine.kernels.launch import (
    let_next_begin,
    num_processors,
    overlap_options,
    padded,
    wait_for_previous,
)
from dayshift.engine.models.config import Activation

_TILE_BYTES = 16_384  # of a weight, that a program holds, and that it has asked for
_MAX_SIZE = 4096
_PROCESSOR_PROGRAMS = 4
_NUM_WARPS = 4


def can_stream(num_weight_rows: int, size: int) -> bool:
    """It is the faster way on an H200: see docs/engine-speed.md. Shorter rows, and few, are not."""
    return _MAX_SIZE - _MAX_SIZE // 8 <= size <= _MAX_SIZE < num_weight_rows


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
    """As `one_token_linear.multiply`, for rows of at most 4,096 columns."""
    num_weight_rows, size = weight.shape
    num_rows = num_weight_rows // 2 if kind else num_weight_rows
    y = torch.empty((1, num_rows), dtype=x.dtype, device=x.device)
    summed = x if residual is None else torch.empty((1, size), dtype=x.dtype, device=x.device)
    columns = padded(size)
    _stream_token[(_PROCESSOR_PROGRAMS * num_processors(x.device),)](
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
        HAS_NORM=norm_weight is not None,
        HAS_BIAS=bias is not None,
        KIND=kind,
        ROWS=max(2, _TILE_BYTES // (columns * x.element_size())),
        COLUMNS=columns,
        **overlap_options(x.device),
        num_warps=_NUM_WARPS,
    )
    return y, summed


@triton.jit
def _stream_token(
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
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,  # of the gated activation, or None
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program's share of the outputs, ROWS at a time, half as many of a gated layer: y (num_rows,), summed
    (SIZE,)."""
    # Rows lie in the order of their outputs: of a gated layer, each row of the gate before that of up.
    WEIGHT_ROWS: tl.constexpr = 1 if KIND is None else 2  # of an output
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    place = program * num_rows // num_programs * WEIGHT_ROWS
    end = (program + 1) * num_rows // num_programs * WEIGHT_ROWS
    column = tl.arange(0, COLUMNS)[None, :]
    weight = _load_rows(place, end, num_rows, weight_ptr, column, SIZE, ROWS, KIND)
    norm = 1.0
    if HAS_NORM:
        norm = tl.load(norm_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    wait_for_previous(OVERLAPS)

    x = tl.load(x_ptr + column, mask=column < SIZE, other=0.0)
    wide = x.to(tl.float32)
    if HAS_NORM:
        added = tl.load(residual_ptr + column, mask=column < SIZE, other=0.0)
        summed = (wide + added.to(tl.float32)).to(x.dtype)
        if program == 0:
            tl.store(summed_ptr + column, summed, mask=column < SIZE)
        wide = summed.to(tl.float32)
        wide *= norm * tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / SIZE + eps)
    narrow: tl.constexpr = y_ptr.dtype.element_ty
    while place < end:
        next_weight = _load_rows(place + ROWS, end, num_rows, weight_ptr, column, SIZE, ROWS, KIND)
        out = tl.sum(weight.to(tl.float32) * wide, axis=1)
        row = place + tl.arange(0, ROWS)
        if KIND is None:
            if HAS_BIAS:
                out += tl.load(bias_ptr + row, mask=row < end, other=0.0).to(tl.float32)
            tl.store(y_ptr + row, out.to(narrow), mask=row < end)
        else:
            # Rounded first, as when the product is stored between the ops.
            gate, up = tl.split(tl.reshape(out.to(narrow).to(tl.float32), (ROWS // 2, 2)))
            pair = place // 2 + tl.arange(0, ROWS // 2)
            tl.store(y_ptr + pair, gated(gate, up, KIND).to(narrow), mask=pair < end // 2)
        weight = next_weight
        place += ROWS
    let_next_begin(OVERLAPS)


@triton.jit
def _load_rows(
    place,
    end,
    num_rows,
    weight_ptr,
    column,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
):
    """ROWS rows of the weight from `place` on, of those in front of `end`."""
    row = place + tl.arange(0, ROWS)
    is_row = (row < end)[:, None]
    if KIND is not None:
        row = row // 2 + (row % 2) * num_rows
    at = weight_ptr + row.to(tl.int64)[:, None] * SIZE + column
    if column.shape[1] == SIZE:
        return tl.load(at, mask=is_row, other=0.0)
    return tl.load(at, mask=is_row & (column < SIZE), other=0.0)
