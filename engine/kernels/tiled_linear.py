"""Linear layers of some tokens on tensor cores, bound by reading the weights: `reference` specifies the ops.

A program multiplies some rows of the weight by all tokens, over the whole length of the product or a part
of it. The parts of a row's sum are stored, and the program that ends last adds them up in their order: so
a token's result depends on nothing but the number of tokens it is padded to. The gated activation comes
before the store, in the same launch.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.activation import gated
from dayshift.engine.kernels.launch import (
    let_next_begin,
    load_inside,
    num_processors,
    overlap_options,
    padded,
    wait_for_previous,
)
from dayshift.engine.models.config import Activation

_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply
_SHARED_BYTES = 128 << 10  # of a program
_MAX_ROW_TILES = 4096  # that are summed from parts


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a launch cuts the weight."""

    rows: int  # of the weight, for a program
    columns: int  # of the weight, for one turn of its loop
    num_splits: int  # programs that share the length of a row
    num_stages: int


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    kind: Activation | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """x weightᵀ + bias, or the gated activation `kind` of it, for up to 64 tokens.

    Shapes and dtypes as in `reference.linear` and `reference.norm_gated_linear`. Launches of one device
    go through one stream: they share what counts the parts that are done.
    """
    num_tokens, size = x.shape
    num_weight_rows = weight.shape[0]
    num_rows = num_weight_rows // 2 if kind else num_weight_rows
    y = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    tokens = padded(num_tokens, _MIN_DOT)
    tiles = tiles or tiles_for(num_tokens, num_weight_rows, size, num_processors(x.device), x.element_size())
    num_tiles = triton.cdiv(num_weight_rows, tiles.rows)
    parts = y  # not written
    if tiles.num_splits > 1:
        num_sums = num_tiles * tiles.num_splits * tiles.rows * tokens
        parts = torch.empty(num_sums, dtype=torch.float32, device=x.device)
    length = triton.cdiv(size, tiles.num_splits * tiles.columns) * tiles.columns
    _multiply_rows[(num_tiles * tiles.num_splits,)](
        x,
        weight,
        x if bias is None else bias,
        y,
        parts,
        _counters(x.device),
        num_tokens,
        num_rows,
        x.stride(0),
        SIZE=size,
        LENGTH=length,
        IS_EVEN=num_weight_rows % tiles.rows == 0 and size == length * tiles.num_splits,
        HAS_BIAS=bias is not None,
        KIND=kind,
        TOKENS=tokens,
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        SPLITS=tiles.num_splits,
        STAGES=tiles.num_stages,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **overlap_options(x.device),
        num_warps=4,
        num_stages=tiles.num_stages,
    )
    return y


def tiles_for(num_tokens: int, num_weight_rows: int, size: int, processors: int, element_size: int) -> Tiles:
    """The tiles of a product: the programs fill the processors as evenly as they can, one to three on each,
    with as many turns of the loop on their way as fit. Found on an H200: see docs/engine-speed.md."""
    rows, columns = 64, 256 // element_size
    num_tiles = triton.cdiv(num_weight_rows, rows)
    fitting = [
        splits
        for splits in (1, 2, 4, 8)
        if splits == 1 or (num_tiles * splits <= 3 * processors and size >= 4 * columns * splits)
    ]
    more = 1 if num_tokens <= 16 else -1  # of two equals: more parts of few tokens, fewer of many
    num_splits = max(fitting, key=lambda splits: (_fill(num_tiles * splits, processors), more * splits))
    per_processor = triton.cdiv(num_tiles * num_splits, processors)
    num_stages = {1: 5, 2: 4, 3: 3}.get(per_processor, 4)
    stage_bytes = (rows + padded(num_tokens, _MIN_DOT)) * columns * element_size
    num_stages = min(num_stages, _SHARED_BYTES // stage_bytes)
    return Tiles(rows=rows, columns=columns, num_splits=num_splits, num_stages=num_stages)


def _fill(num_programs: int, processors: int) -> float:
    """The share of the processors' places that are taken when all have begun."""
    return num_programs / (-(-num_programs // processors) * processors)


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """How many parts of each tile are done. Zero between launches: the last program sees to it."""
    return torch.zeros(_MAX_ROW_TILES, dtype=torch.int32, device=device)


@triton.jit
def weight_rows(tile, num_rows, ROWS: tl.constexpr, KIND: tl.constexpr):
    """The tile's rows of the weight, (ROWS,): of a gated layer, each row of the gate before that of up."""
    place = tile * ROWS + tl.arange(0, ROWS)
    if KIND is not None:
        place = place // 2 + (place % 2) * num_rows
    return place


@triton.jit
def _multiply_rows(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    counters_ptr,
    num_tokens,
    num_rows,
    x_stride,
    SIZE: tl.constexpr,
    LENGTH: tl.constexpr,  # of a part
    IS_EVEN: tl.constexpr,  # no tile reaches beyond the weight
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,  # of the gated activation, or None
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """ROWS outputs of all tokens, half as many of a gated layer: y (num_tokens, num_rows)."""
    tile, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    row = weight_rows(tile, num_rows, ROWS, KIND)
    is_row = tile * ROWS + tl.arange(0, ROWS) < (num_rows if KIND is None else 2 * num_rows)
    token = tl.arange(0, TOKENS)
    is_token = token < num_tokens
    wait_for_previous(OVERLAPS)

    total = tl.zeros((ROWS, TOKENS), tl.float32)
    first = split * LENGTH
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * SIZE
    for start in tl.range(first, first + LENGTH, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)[None, :]
        is_column = column < SIZE
        weight = load_inside(weight_row + column, is_row[:, None] & is_column, IS_EVEN)
        x_at = x_ptr + token[:, None] * x_stride + column
        if IS_EVEN:
            x = tl.load(x_at, mask=is_token[:, None], other=0.0)
        else:
            x = tl.load(x_at, mask=is_token[:, None] & is_column, other=0.0)
        total = tl.dot(weight, tl.trans(x), total, input_precision=PRECISION)
    let_next_begin(OVERLAPS)

    is_last = True
    if SPLITS > 1:
        place = tl.arange(0, ROWS)[:, None] * TOKENS + token[None, :]
        part = parts_ptr + tile.to(tl.int64) * (SPLITS * ROWS * TOKENS) + place
        tl.store(part + split * (ROWS * TOKENS), total, cache_modifier=".cg")
        tl.debug_barrier()  # the whole part is stored before it is counted
        is_last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            tl.store(counters_ptr + tile, 0)
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            for other in tl.static_range(SPLITS):
                total += tl.load(part + other * (ROWS * TOKENS), cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias_ptr + row, mask=is_row, other=0.0).to(tl.float32)[:, None]
        narrow = y_ptr.dtype.element_ty
        if KIND is None:
            out = y_ptr + token[None, :] * num_rows + row[:, None]
            tl.store(out, total.to(narrow), mask=is_row[:, None] & is_token[None, :])
        else:
            # Rounded first, as when the product is stored between the ops.
            pairs = tl.reshape(total.to(narrow).to(tl.float32), (ROWS // 2, 2, TOKENS))
            gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
            pair = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
            out = y_ptr + token[None, :] * num_rows + pair[:, None]
            mask = (pair < num_rows)[:, None] & is_token[None, :]
            tl.store(out, gated(gate, up, KIND).to(narrow), mask=mask)
