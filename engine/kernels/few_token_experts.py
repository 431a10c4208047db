"""`moe_mlp` of a few tokens, bound by reading the experts' weights: every picked expert is read once.

Up to `MAX_PAIRED` tokens, experts are seldom shared: a program takes rows of one pick's expert, and the
second product sums a token's picks as it goes. Beyond, the picks are first listed by expert, and a
program multiplies rows of one expert by the tokens that picked it; a last launch sums each token's
picks in their order. Nothing is read back to the host, and no result depends on the order in which
programs run. `reference.moe_mlp` and `reference.route_top_k` specify the ops.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.activation import gated
from dayshift.engine.kernels.launch import padded
from dayshift.engine.models.config import Activation

MAX_TOKENS = 128  # beyond it a grouped matrix product is bound by arithmetic, not by reading
MAX_PAIRED = 4
_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply
_SUM_COLUMNS = 1024


def route_top_k(
    logits: torch.Tensor, num_picked: int, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of softmax(logits) and their experts, in one launch; any number of tokens.

    Shapes and dtypes as in `reference.route_top_k`; of equal logits the first is picked first.
    """
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, num_picked), dtype=torch.float32, device=logits.device)
    expert_ids = torch.empty((num_tokens, num_picked), dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route_token[(num_tokens,)](
            logits,
            weights,
            expert_ids,
            num_experts,
            logits.stride(0),
            NUM_PICKED=num_picked,
            PICKED_PAD=padded(num_picked),
            EXPERTS_PAD=padded(num_experts),
            IS_NORMALIZED=is_normalized,
            num_warps=1,
        )
    return weights, expert_ids


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
    """Mixture of gated MLPs of at most `MAX_TOKENS` tokens. Shapes and dtypes as in `reference.moe_mlp`."""
    num_tokens, size = x.shape
    num_picked, num_inner = expert_ids.shape[1], down.shape[2]
    inner = torch.empty((num_tokens * num_picked, num_inner), dtype=x.dtype, device=x.device)
    y = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    sizes = {"SIZE": size, "INNER": num_inner, "NUM_PICKED": num_picked}
    sizes["HAS_BIAS"] = gate_up_bias is not None
    gate_up_bias = gate_up if gate_up_bias is None else gate_up_bias  # not read
    down_bias = down if down_bias is None else down_bias
    if num_tokens <= MAX_PAIRED:
        tiles = {"ROWS": 8, "COLUMNS": _columns(size), "STAGES": 4}
        _pick_gate_up[(num_tokens * num_picked, triton.cdiv(num_inner, 8))](
            x, expert_ids, gate_up, gate_up_bias, inner, x.stride(0), KIND=activation, **sizes, **tiles
        )
        tiles = {"ROWS": 8, "COLUMNS": _columns(num_inner), "STAGES": 4}
        _picks_down[(num_tokens, triton.cdiv(size, 8))](
            inner, weights, expert_ids, down, down_bias, y, **sizes, **tiles
        )
        return y

    num_experts, num_pairs = gate_up.shape[0], num_tokens * num_picked
    pairs = torch.empty((num_experts, num_tokens), dtype=torch.int32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    _list_pairs[(num_experts,)](expert_ids, pairs, counts, num_pairs, num_tokens, PAIRS_PAD=padded(num_pairs))
    common = {
        "TOKENS": _MIN_DOT,
        "STAGES": 3,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    _expert_gate_up[(num_experts, triton.cdiv(num_inner, 32))](
        x,
        pairs,
        counts,
        gate_up,
        gate_up_bias,
        inner,
        num_tokens,
        x.stride(0),
        KIND=activation,
        **sizes,
        **common,
        ROWS=32,
        COLUMNS=min(128, padded(size, _MIN_DOT)),
    )
    outs = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
    _expert_down[(num_experts, triton.cdiv(size, 64))](
        inner,
        pairs,
        counts,
        down,
        down_bias,
        outs,
        num_tokens,
        **sizes,
        **common,
        ROWS=64,
        COLUMNS=min(128, padded(num_inner, _MIN_DOT)),
    )
    _sum_picks[(num_tokens, triton.cdiv(size, _SUM_COLUMNS))](
        outs, weights, y, SIZE=size, NUM_PICKED=num_picked, COLUMNS=_SUM_COLUMNS
    )
    return y


def _columns(size: int) -> int:
    """Columns in a turn of a loop: the largest power of two up to 512 that divides `size`, at least 64."""
    return max(64, min(512, size & -size))


@triton.jit
def _route_token(
    logits_ptr,
    weights_ptr,
    expert_ids_ptr,
    num_experts,
    token_stride,
    NUM_PICKED: tl.constexpr,
    PICKED_PAD: tl.constexpr,
    EXPERTS_PAD: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
):
    """Pick the experts of the program's token, one after the other."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PAD)
    logits = tl.load(
        logits_ptr + token * token_stride + expert, mask=expert < num_experts, other=float("-inf")
    ).to(tl.float32)
    exponentials = tl.exp(logits - tl.max(logits, axis=0))
    total = tl.sum(exponentials, axis=0)
    pick = tl.arange(0, PICKED_PAD)
    picked = tl.zeros((PICKED_PAD,), tl.int32)
    weights = tl.zeros((PICKED_PAD,), tl.float32)
    for index in tl.static_range(NUM_PICKED):
        best = tl.argmax(logits, axis=0)
        is_best = expert == best
        weight = tl.sum(tl.where(is_best, exponentials, 0.0), axis=0) / total
        picked = tl.where(pick == index, best, picked)
        weights = tl.where(pick == index, weight, weights)
        logits = tl.where(is_best, float("-inf"), logits)
    if IS_NORMALIZED:
        weights = weights / tl.sum(weights, axis=0)
    out = token * NUM_PICKED + pick
    tl.store(weights_ptr + out, weights, mask=pick < NUM_PICKED)
    tl.store(expert_ids_ptr + out, picked.to(tl.int64), mask=pick < NUM_PICKED)


@triton.jit
def _gated(gate, up, KIND: tl.constexpr, narrow: tl.constexpr):
    """The gated activation of values that are rounded first, as when they are stored between the ops."""
    return gated(gate.to(narrow).to(tl.float32), up.to(narrow).to(tl.float32), KIND).to(narrow)


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
    STAGES: tl.constexpr,
):
    """inner (num_tokens * num_picked, INNER): ROWS values of one pick."""
    pair = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(expert_ids_ptr + pair)
    x_row = x_ptr + (pair // NUM_PICKED).to(tl.int64) * x_stride
    gate_row = gate_up_ptr + (expert * (2 * INNER) + row)[:, None] * SIZE
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, SIZE, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        is_weight = (row < INNER)[:, None] & (column < SIZE)[None, :]
        x = tl.load(x_row + column, mask=column < SIZE, other=0.0).to(tl.float32)[None, :]
        gate_weight = tl.load(gate_row + column[None, :], mask=is_weight, other=0.0)
        up_weight = tl.load(gate_row + INNER * SIZE + column[None, :], mask=is_weight, other=0.0)
        gate += gate_weight.to(tl.float32) * x
        up += up_weight.to(tl.float32) * x
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if HAS_BIAS:
        bias = bias_ptr + expert * (2 * INNER) + row
        gate += tl.load(bias, mask=row < INNER, other=0.0).to(tl.float32)
        up += tl.load(bias + INNER, mask=row < INNER, other=0.0).to(tl.float32)
    y = _gated(gate, up, KIND, inner_ptr.dtype.element_ty)
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y (num_tokens, SIZE): ROWS values of one token, its picks summed in their order."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    narrow = y_ptr.dtype.element_ty
    total = tl.zeros((ROWS,), tl.float32)
    for index in tl.static_range(NUM_PICKED):
        pair = token * NUM_PICKED + index
        expert = tl.load(expert_ids_ptr + pair)
        weight = tl.load(weights_ptr + pair)
        down_row = down_ptr + (expert * SIZE + row)[:, None] * INNER
        product = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in tl.range(0, INNER, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            is_weight = (row < SIZE)[:, None] & (column < INNER)[None, :]
            inner = tl.load(inner_ptr + pair * INNER + column, mask=column < INNER, other=0.0)
            down = tl.load(down_row + column[None, :], mask=is_weight, other=0.0)
            product += down.to(tl.float32) * inner.to(tl.float32)[None, :]
        out = tl.sum(product, axis=1)
        if HAS_BIAS:
            out += tl.load(bias_ptr + expert * SIZE + row, mask=row < SIZE, other=0.0).to(tl.float32)
        total += out.to(narrow).to(tl.float32) * weight
    tl.store(y_ptr + token * SIZE + row, total.to(narrow), mask=row < SIZE)


@triton.jit
def _list_pairs(expert_ids_ptr, pairs_ptr, counts_ptr, num_pairs, num_tokens, PAIRS_PAD: tl.constexpr):
    """pairs (num_experts, num_tokens): the picks of the program's expert in order; counts (num_experts,)."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS_PAD)
    picked = tl.load(expert_ids_ptr + pair, mask=pair < num_pairs, other=-1)
    is_mine = (picked == expert).to(tl.int32)
    place = tl.cumsum(is_mine, axis=0) - 1
    tl.store(pairs_ptr + expert * num_tokens + place, pair, mask=is_mine == 1)
    tl.store(counts_ptr + expert, tl.sum(is_mine, axis=0))


@triton.jit
def _expert_gate_up(
    x_ptr,
    pairs_ptr,
    counts_ptr,
    gate_up_ptr,
    bias_ptr,
    inner_ptr,
    num_tokens,
    x_stride,
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
):
    """inner (num_tokens * num_picked, INNER): ROWS values of every pick of one expert."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts_ptr + expert)
    gate_row = gate_up_ptr + (expert * (2 * INNER) + row)[:, None] * SIZE
    for first in range(0, count, TOKENS):
        index = first + tl.arange(0, TOKENS)
        pair = tl.load(pairs_ptr + expert * num_tokens + index, mask=index < count, other=0)
        x_row = x_ptr + (pair // NUM_PICKED).to(tl.int64)[:, None] * x_stride
        gate = tl.zeros((ROWS, TOKENS), tl.float32)
        up = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, SIZE, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            is_column = (column < SIZE)[None, :]
            is_weight = (row < INNER)[:, None] & is_column
            x = tl.load(x_row + column[None, :], mask=is_column, other=0.0)
            gate_weight = tl.load(gate_row + column[None, :], mask=is_weight, other=0.0)
            up_weight = tl.load(gate_row + INNER * SIZE + column[None, :], mask=is_weight, other=0.0)
            gate = tl.dot(gate_weight, tl.trans(x), gate, input_precision=PRECISION)
            up = tl.dot(up_weight, tl.trans(x), up, input_precision=PRECISION)
        if HAS_BIAS:
            bias = bias_ptr + expert * (2 * INNER) + row
            gate += tl.load(bias, mask=row < INNER, other=0.0).to(tl.float32)[:, None]
            up += tl.load(bias + INNER, mask=row < INNER, other=0.0).to(tl.float32)[:, None]
        y = _gated(gate, up, KIND, inner_ptr.dtype.element_ty)
        out = inner_ptr + pair.to(tl.int64)[None, :] * INNER + row[:, None]
        tl.store(out, y, mask=(row < INNER)[:, None] & (index < count)[None, :])


@triton.jit
def _expert_down(
    inner_ptr,
    pairs_ptr,
    counts_ptr,
    down_ptr,
    bias_ptr,
    outs_ptr,
    num_tokens,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    NUM_PICKED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """outs (num_tokens * num_picked, SIZE): ROWS values of every pick of one expert."""
    expert = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    count = tl.load(counts_ptr + expert)
    down_row = down_ptr + (expert * SIZE + row)[:, None] * INNER
    for first in range(0, count, TOKENS):
        index = first + tl.arange(0, TOKENS)
        pair = tl.load(pairs_ptr + expert * num_tokens + index, mask=index < count, other=0).to(tl.int64)
        product = tl.zeros((ROWS, TOKENS), tl.float32)
        for start in tl.range(0, INNER, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            is_column = (column < INNER)[None, :]
            inner = tl.load(inner_ptr + pair[:, None] * INNER + column[None, :], mask=is_column, other=0.0)
            down = tl.load(down_row + column[None, :], mask=(row < SIZE)[:, None] & is_column, other=0.0)
            product = tl.dot(down, tl.trans(inner), product, input_precision=PRECISION)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * SIZE + row, mask=row < SIZE, other=0.0)
            product += bias.to(tl.float32)[:, None]
        out = outs_ptr + pair[None, :] * SIZE + row[:, None]
        is_out = (row < SIZE)[:, None] & (index < count)[None, :]
        tl.store(out, product.to(outs_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def _sum_picks(
    outs_ptr, weights_ptr, y_ptr, SIZE: tl.constexpr, NUM_PICKED: tl.constexpr, COLUMNS: tl.constexpr
):
    """y (num_tokens, SIZE): a token's picks, each times its weight, in their order."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for index in tl.static_range(NUM_PICKED):
        pair = token * NUM_PICKED + index
        out = tl.load(outs_ptr + pair * SIZE + column, mask=column < SIZE, other=0.0)
        total += out.to(tl.float32) * tl.load(weights_ptr + pair)
    tl.store(y_ptr + token * SIZE + column, total.to(y_ptr.dtype.element_ty), mask=column < SIZE)
