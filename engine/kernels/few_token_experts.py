"""`moe_mlp` of a few tokens, which seldom share an expert: every pick reads its expert, at memory speed.

A program of the first product takes rows of one pick's expert over their whole length, one of the
second rows of all picks of a token, which it sums in their order: two launches, and every weight that a
program needs is on its way before the first is used. `reference.moe_mlp` specifies the op.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.activation import gated_narrow
from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous
from dayshift.engine.models.config import Activation

MAX_TOKENS = 4  # beyond it more than one token in ten shares an expert with another
_ROWS = 2  # of a weight, for a program
_EARLY_TURNS = 2  # of the loop over columns: their weights are asked for before the inputs are there


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Mixture of gated MLPs of a few tokens. Shapes and dtypes as in `reference.moe_mlp`."""
    num_tokens, size = x.shape
    num_picked, num_inner = expert_ids.shape[1], down.shape[2]
    inner = torch.empty((num_tokens * num_picked, num_inner), dtype=x.dtype, device=x.device)
    y = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    common = {
        "SIZE": size,
        "INNER": num_inner,
        "NUM_PICKED": num_picked,
        "HAS_BIAS": gate_up_bias is not None,
        "ROWS": _ROWS,
        **overlap_options(x.device),
    }
    _pick_gate_up[(triton.cdiv(num_inner, _ROWS), num_tokens * num_picked)](
        x,
        expert_ids,
        gate_up,
        gate_up if gate_up_bias is None else gate_up_bias,  # not read
        inner,
        x.stride(0),
        KIND=activation,
        COLUMNS=_columns(size, 2048),
        **common,
    )
    columns = _columns(num_inner, max(16, 2048 // padded(num_picked)))
    _picks_down[(triton.cdiv(size, _ROWS), num_tokens)](
        inner,
        weights,
        expert_ids,
        down,
        down if down_bias is None else down_bias,
        y,
        PICKED_PAD=padded(num_picked),
        EARLY_TURNS=min(_EARLY_TURNS, num_inner // columns),
        COLUMNS=columns,
        **common,
    )
    return y


def _columns(size: int, most: int) -> int:
    """Columns in a turn of a loop: the most, a power of two, that waste no more than an eighth."""
    columns = most
    while columns > 16 and triton.cdiv(size, columns) * columns > size + size // 8:
        columns //= 2
    return columns


@triton.jit
def _pick_gate_up(
    x_ptr,
    expert_ids_ptr,
    gate_up_ptr,
    bias_ptr,
    inner_ptr,
    x_stride,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    NUM_PICKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """inner (num_tokens * num_picked, INNER): ROWS values of one pick."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)  # not before: the next kernel reads the picks without waiting for this one
    pair = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(expert_ids_ptr + pair)
    x_row = x_ptr + (pair // NUM_PICKED).to(tl.int64) * x_stride
    gate_row = gate_up_ptr + (expert * (2 * INNER) + row)[:, None] * SIZE
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.static_range(0, SIZE, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_weight = (row < INNER)[:, None] & (column < SIZE)[None, :]
        gate_weight = tl.load(gate_row + column[None, :], mask=is_weight, other=0.0)
        up_weight = tl.load(gate_row + INNER * SIZE + column[None, :], mask=is_weight, other=0.0)
        x = tl.load(x_row + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        gate += gate_weight.to(tl.float32) * x
        up += up_weight.to(tl.float32) * x
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if HAS_BIAS:
        bias = bias_ptr + expert * (2 * INNER) + row
        gate += tl.load(bias, mask=row < INNER, other=0.0).to(tl.float32)
        up += tl.load(bias + INNER, mask=row < INNER, other=0.0).to(tl.float32)
    y = gated_narrow(gate, up, KIND, inner_ptr.dtype.element_ty)
    tl.store(inner_ptr + pair.to(tl.int64) * INNER + row, y, mask=row < INNER)


@triton.jit
def _picks_down(
    inner_ptr,
    weights_ptr,
    expert_ids_ptr,
    down_ptr,
    bias_ptr,
    y_ptr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    NUM_PICKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PICKED_PAD: tl.constexpr,
    EARLY_TURNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """y (num_tokens, SIZE): ROWS values of one token, over all its picks."""
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pick = tl.arange(0, PICKED_PAD)
    pair, is_pick = token * NUM_PICKED + pick, pick < NUM_PICKED
    # Written before the kernel that comes before this one, which has waited for it.
    expert = tl.load(expert_ids_ptr + pair, mask=is_pick, other=0)
    weight = tl.load(weights_ptr + pair, mask=is_pick, other=0.0)
    down_row = down_ptr + (expert[:, None] * SIZE + row[None, :])[:, :, None] * INNER
    is_row = (is_pick[:, None] & (row < SIZE)[None, :])[:, :, None]
    # The first turns' weights are asked for before the kernel in front has ended.
    early = ()
    for turn in tl.static_range(EARLY_TURNS):
        early += (_load_columns(down_row, is_row, turn * COLUMNS, INNER, COLUMNS),)
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    product = tl.zeros((PICKED_PAD, ROWS, COLUMNS), tl.float32)
    for start in tl.static_range(0, INNER, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inner = tl.load(
            inner_ptr + pair[:, None] * INNER + column[None, :],
            mask=is_pick[:, None] & (column < INNER)[None, :],
            other=0.0,
        )
        if start < EARLY_TURNS * COLUMNS:
            down = early[start // COLUMNS]
        else:
            down = _load_columns(down_row, is_row, start, INNER, COLUMNS)
        product += down.to(tl.float32) * inner.to(tl.float32)[:, None, :]
    out = tl.sum(product, axis=2)  # (PICKED_PAD, ROWS)
    if HAS_BIAS:
        out += tl.load(bias_ptr + expert[:, None] * SIZE + row[None, :], mask=is_pick[:, None], other=0.0).to(
            tl.float32
        )
    narrow: tl.constexpr = y_ptr.dtype.element_ty
    total = tl.sum(out.to(narrow).to(tl.float32) * weight[:, None], axis=0)
    tl.store(y_ptr + token * SIZE + row, total.to(narrow), mask=row < SIZE)


@triton.jit
def _load_columns(row_ptr, is_row, start, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS of rows (..., 1) of a weight, from `start` on."""
    column = start + tl.arange(0, COLUMNS)[None, None, :]
    return tl.load(row_ptr + column, mask=is_row & (column < SIZE), other=0.0)
