"""`moe_mlp` as products of tiles: some tokens of one expert times some rows of its weights.

Pairs of a token and one of its picks are listed by expert (`expert_tiles`). The first product
reads the rows of x where its pairs' tokens are and keeps act(gate) * up in the order of the list; the
second reads those and writes a row for each pair; a last launch sums each token's picks in their order.
Few pairs to an expert: the weights are the left operand, read at memory speed while tensor cores
multiply them by 16 or 32 tokens. Many: the tokens are the left operand, in tiles of 128, or 64 where an
expert has no more left. Nothing is read back to the host, and no result depends on the order in which
programs run.
`reference.moe_mlp` specifies the op.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806, RET505
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from dayshift.engine.kernels.activation import gated_narrow
from dayshift.engine.kernels.expert_tiles import tile_experts
from dayshift.engine.kernels.launch import (
    let_next_begin,
    overlap_options,
    shared_memory_bytes,
    wait_for_previous,
)
from dayshift.engine.models.config import Activation

_SUM_COLUMNS = 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut."""

    rows: int  # of the weights; in the first product of gate and of up each
    row_bytes: int  # of tokens and weights, for one turn of the loop
    num_warps: int
    max_stages: int

    def num_stages(self, num_rows: int, available_bytes: int) -> int:
        """Turns of the loop whose operands, of so many rows, are in shared memory at once."""
        return max(1, min(self.max_stages, (available_bytes - 2048) // (num_rows * self.row_bytes)))


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of the two products, for up to so many pairs to an expert on average."""

    max_pairs: float
    tokens: int
    gate_up: Tile
    down: Tile


# Measured on an H200, Qwen3-30B-A3B: 133, 300, 590 tokens have 8, 19, 37 pairs to an expert.
TILINGS = (
    Tiling(14, 16, Tile(64, 256, 4, 3), Tile(128, 256, 4, 3)),
    Tiling(26, 32, Tile(64, 256, 4, 3), Tile(128, 128, 4, 4)),
    Tiling(math.inf, 128, Tile(128, 128, 8, 4), Tile(128, 128, 4, 3)),
)


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
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Mixture of gated MLPs of any number of tokens. Shapes and dtypes as in `reference.moe_mlp`;
    the rows of both weights a multiple of 16 bytes long. `tiling` None: by the number of pairs."""
    (num_tokens, size), num_picked = x.shape, expert_ids.shape[1]
    num_experts, num_pairs, num_inner = len(down), expert_ids.numel(), down.shape[2]
    if num_tokens == 0:
        return torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    tiling = tiling or next(t for t in TILINGS if num_pairs / num_experts <= t.max_pairs)
    listed = tile_experts(expert_ids, num_experts, tiling.tokens)
    inner = torch.empty((num_pairs, num_inner), dtype=x.dtype, device=x.device)
    outs = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    available = shared_memory_bytes(x.device)
    common = {
        "SIZE": size,
        "INNER": num_inner,
        "HAS_BIAS": gate_up_bias is not None,
        "TOKENS": tiling.tokens,
        "HALF": tiling.tokens // 2 if tiling.tokens > 64 else tiling.tokens,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        **overlap_options(x.device),
    }

    tile, columns = tiling.gate_up, tiling.gate_up.row_bytes // x.element_size()
    _gate_up_tile[(triton.cdiv(num_inner, tile.rows), len(listed.tiles))](
        x,
        listed.order,
        listed.tiles,
        TensorDescriptor(
            gate_up,
            [2 * num_experts, num_inner, size],
            [num_inner * size, size, 1],
            [2, tile.rows, columns],
        ),
        gate_up if gate_up_bias is None else gate_up_bias,  # not read
        inner,
        x.stride(0),
        KIND=activation,
        NUM_PICKED=num_picked,
        ROWS=tile.rows,
        COLUMNS=columns,
        STAGES=tile.num_stages(tiling.tokens + 2 * tile.rows, available),
        num_warps=tile.num_warps,
        **common,
    )
    tile, columns = tiling.down, tiling.down.row_bytes // x.element_size()
    _down_tile[(triton.cdiv(size, tile.rows), len(listed.tiles))](
        TensorDescriptor.from_tensor(inner, [common["TOKENS"], columns]),
        TensorDescriptor.from_tensor(inner, [common["HALF"], columns]),
        listed.order,
        listed.tiles,
        TensorDescriptor.from_tensor(down, [1, tile.rows, columns]),
        down if down_bias is None else down_bias,
        outs,
        ROWS=tile.rows,
        COLUMNS=columns,
        STAGES=tile.num_stages(tiling.tokens + tile.rows, available),
        num_warps=tile.num_warps,
        **common,
    )
    return sum_picks(outs, weights)


def sum_picks(outs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """What the experts of each token gave, weighted. Shapes and dtypes as in `reference.sum_picks`."""
    (num_tokens, num_picked), size = weights.shape, outs.shape[1]
    y = torch.empty((num_tokens, size), dtype=outs.dtype, device=outs.device)
    if num_tokens:
        _sum_picks[(num_tokens, triton.cdiv(size, _SUM_COLUMNS))](
            outs,
            weights,
            y,
            SIZE=size,
            NUM_PICKED=num_picked,
            COLUMNS=_SUM_COLUMNS,
            **overlap_options(outs.device),
        )
    return y


@triton.jit
def _multiply(tokens, weights, total, IS_FEW: tl.constexpr, PRECISION: tl.constexpr):
    """total + tokens weightsᵀ (tokens, rows); transposed where few tokens are the right operand."""
    if IS_FEW:
        return tl.dot(weights, tokens.T, total, input_precision=PRECISION)
    else:
        return tl.dot(tokens, weights.T, total, input_precision=PRECISION)


@triton.jit
def _gate_up_tile(
    x_ptr,
    order_ptr,
    tiles_ptr,
    gate_up_desc,
    bias_ptr,
    inner_ptr,
    x_stride,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    NUM_PICKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """inner (num_pairs, INNER), in the order of the list: ROWS values of one tile's pairs."""
    wait_for_previous(OVERLAPS)
    first_row, entry = tl.program_id(0) * ROWS, tiles_ptr + 3 * tl.program_id(1)
    expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if (HALF < TOKENS) & (count > HALF):
        _gate_up_of(
            x_ptr, order_ptr, gate_up_desc, bias_ptr, inner_ptr, x_stride, first_row, expert, first, count,
            KIND, SIZE, INNER, NUM_PICKED, HAS_BIAS, TOKENS, ROWS, COLUMNS, STAGES, PRECISION, OVERLAPS,
        )  # fmt: skip
    elif count > 0:
        _gate_up_of(
            x_ptr, order_ptr, gate_up_desc, bias_ptr, inner_ptr, x_stride, first_row, expert, first, count,
            KIND, SIZE, INNER, NUM_PICKED, HAS_BIAS, HALF, ROWS, COLUMNS, STAGES, PRECISION, OVERLAPS,
        )  # fmt: skip


@triton.jit
def _gate_up_of(
    x_ptr,
    order_ptr,
    gate_up_desc,
    bias_ptr,
    inner_ptr,
    x_stride,
    first_row,
    expert,
    first,
    count,
    KIND: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    NUM_PICKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """ROWS values of act(gate) * up of at most TOKENS pairs."""
    IS_FEW: tl.constexpr = TOKENS < 64
    index = tl.arange(0, TOKENS)
    pair = tl.load(order_ptr + first + index, mask=index < count, other=0)
    x_row = x_ptr + (pair // NUM_PICKED).to(tl.int64)[:, None] * x_stride
    total = tl.zeros((2 * ROWS, TOKENS) if IS_FEW else (TOKENS, 2 * ROWS), tl.float32)
    for start in tl.range(0, SIZE, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)[None, :]
        if SIZE % COLUMNS == 0:
            x = tl.load(x_row + column)
        else:
            x = tl.load(x_row + column, mask=column < SIZE, other=0.0)
        gate_up = gate_up_desc.load([2 * expert, first_row, start]).reshape(2 * ROWS, COLUMNS)
        total = _multiply(x, gate_up, total, IS_FEW, PRECISION)
    let_next_begin(OVERLAPS)
    if IS_FEW:
        gate, up = total.reshape(2, ROWS, TOKENS).permute(1, 2, 0).split()
        gate, up = gate.T, up.T
    else:
        gate, up = total.reshape(TOKENS, 2, ROWS).permute(0, 2, 1).split()
    row = first_row + tl.arange(0, ROWS)[None, :]
    if HAS_BIAS:
        bias = bias_ptr + expert * (2 * INNER) + row
        gate += tl.load(bias, mask=row < INNER, other=0.0).to(tl.float32)
        up += tl.load(bias + INNER, mask=row < INNER, other=0.0).to(tl.float32)
    out = inner_ptr + (first + index).to(tl.int64)[:, None] * INNER + row
    y = gated_narrow(gate, up, KIND, inner_ptr.dtype.element_ty)
    tl.store(out, y, mask=(index < count)[:, None] & (row < INNER))


@triton.jit
def _down_tile(
    inner_desc,
    half_desc,
    order_ptr,
    tiles_ptr,
    down_desc,
    bias_ptr,
    outs_ptr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """outs (num_pairs, SIZE), in the order of the pairs' numbers: ROWS values of one tile's pairs."""
    wait_for_previous(OVERLAPS)
    first_row, entry = tl.program_id(0) * ROWS, tiles_ptr + 3 * tl.program_id(1)
    expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if (HALF < TOKENS) & (count > HALF):
        _down_of(
            inner_desc, order_ptr, down_desc, bias_ptr, outs_ptr, first_row, expert, first, count,
            SIZE, INNER, HAS_BIAS, TOKENS, ROWS, COLUMNS, STAGES, PRECISION, OVERLAPS,
        )  # fmt: skip
    elif count > 0:
        _down_of(
            half_desc, order_ptr, down_desc, bias_ptr, outs_ptr, first_row, expert, first, count,
            SIZE, INNER, HAS_BIAS, HALF, ROWS, COLUMNS, STAGES, PRECISION, OVERLAPS,
        )  # fmt: skip


@triton.jit
def _down_of(
    inner_desc,
    order_ptr,
    down_desc,
    bias_ptr,
    outs_ptr,
    first_row,
    expert,
    first,
    count,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """ROWS outputs of at most TOKENS pairs. Rows of `inner` beyond them belong to others: not kept."""
    IS_FEW: tl.constexpr = TOKENS < 64
    total = tl.zeros((ROWS, TOKENS) if IS_FEW else (TOKENS, ROWS), tl.float32)
    for start in tl.range(0, INNER, COLUMNS, num_stages=STAGES):
        inner = inner_desc.load([first, start])
        down = down_desc.load([expert, first_row, start]).reshape(ROWS, COLUMNS)
        total = _multiply(inner, down, total, IS_FEW, PRECISION)
    let_next_begin(OVERLAPS)
    if IS_FEW:
        total = total.T
    index = tl.arange(0, TOKENS)
    row = first_row + tl.arange(0, ROWS)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert * SIZE + row, mask=row < SIZE, other=0.0).to(tl.float32)
    pair = tl.load(order_ptr + first + index, mask=index < count, other=0)
    out = outs_ptr + pair.to(tl.int64)[:, None] * SIZE + row
    tl.store(out, total.to(outs_ptr.dtype.element_ty), mask=(index < count)[:, None] & (row < SIZE))


@triton.jit
def _sum_picks(
    outs_ptr,
    weights_ptr,
    y_ptr,
    SIZE: tl.constexpr,
    NUM_PICKED: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """y (num_tokens, SIZE): a token's picks, each times its weight, in their order."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for index in tl.static_range(NUM_PICKED):
        pair = token * NUM_PICKED + index
        out = tl.load(outs_ptr + pair * SIZE + column, mask=column < SIZE, other=0.0)
        total += out.to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(y_ptr + token * SIZE + column, total.to(y_ptr.dtype.element_ty), mask=column < SIZE)
