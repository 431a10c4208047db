"""Attention of sequences with one query (decodes): their keys in splits (flash decoding: Dao et al. 2023).

A sequence's splits follow from its own length, and are combined in order, so its result does not
depend on its neighbours; how many programs share them follows from the launch's shape, so that a
few sequences fill the GPU and many need no more than a wave or two of programs.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.attention_tiles import angles_of_tile, attend_keys, store_out, store_part
from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous

_SPLIT_KEYS = 256  # the least
_MAX_SPLITS = 32  # longer sequences have longer splits
_TILE_KEYS = 32
_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply
_NUM_PROGRAMS = 2048  # four waves of programs on an H200
_TURN_SPLITS = 8  # added up at once


def attend_decodes(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    cos_sin: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    constants: dict[str, Any],
) -> None:
    """Fill the rows of `out` whose sequences have one query; the arguments of `paged_attention`.

    `constants`: the compile-time constants of both kernels that follow from the model.
    """
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    batch, half_pad = len(seq_lens), constants["HALF_PAD"]
    is_wide = q.dtype == torch.float32  # takes twice the registers and shared memory
    max_splits = min(_MAX_SPLITS, -(-block_tables.shape[1] * block_size // _SPLIT_KEYS))
    num_programs = min(max_splits, max(4, -(-_NUM_PROGRAMS // (batch * num_kv_heads))))
    partial = q.new_empty((batch, num_heads, max_splits, head_dim), dtype=torch.float32)
    stats = q.new_empty((batch, num_heads, max_splits, 2), dtype=torch.float32)
    splits = {"SPLIT_KEYS": _SPLIT_KEYS, "MAX_SPLITS": _MAX_SPLITS, "WINDOW": constants["WINDOW"]}
    _attend_split[(num_programs, num_kv_heads, batch)](
        q,
        k_pool,
        v_pool,
        block_tables,
        seq_lens,
        query_start,
        cos_sin,
        q if sinks is None else sinks,  # never read without sinks
        out,
        partial,
        stats,
        block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        len(cos_sin),
        max_splits,
        **(constants | splits),
        HAS_SINKS=sinks is not None,
        TILE_ROWS=padded(constants["GROUP"], _MIN_DOT),
        TILE_KEYS=_TILE_KEYS,
        num_warps=8 if is_wide else 2 if half_pad <= 64 else 4,
        num_stages=1 if is_wide else 3,
        **overlap_options(q.device),
    )
    if max_splits > 1:
        _combine_splits[(batch, num_heads)](
            partial,
            stats,
            seq_lens,
            query_start,
            out,
            max_splits,
            HEAD_DIM=head_dim,
            DIM_PAD=padded(head_dim),
            TURN_SPLITS=_TURN_SPLITS,
            **splits,
            num_warps=1,
            **overlap_options(q.device),
        )


@triton.jit
def _splits_of(seq_len, SPLIT_KEYS: tl.constexpr, MAX_SPLITS: tl.constexpr, WINDOW: tl.constexpr):
    """Length of a sequence's splits, the first that its window reaches, and their number: at least 1."""
    length = SPLIT_KEYS * tl.maximum(tl.cdiv(seq_len, SPLIT_KEYS * MAX_SPLITS), 1)
    first = 0
    if WINDOW:
        first = tl.maximum(seq_len - WINDOW, 0) // length
    return length, first, tl.maximum(tl.cdiv(seq_len, length), 1)


@triton.jit(do_not_specialize=["table_stride", "num_positions", "max_splits"])
def _attend_split(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_ptr,
    cos_sin_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    table_stride,
    q_token_stride,
    q_head_stride,
    num_positions,
    max_splits,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Some splits of a sequence with one query, for the GROUP heads of one KV head.

    Leaves each split's sums, largest score and sum of exponentials at (sequence, head, split); the
    output itself where there is one split only.
    """
    let_next_begin(OVERLAPS)
    tile_cos, tile_sin = angles_of_tile(cos_sin_ptr, num_positions, HALF, HALF_PAD, TILE_KEYS)
    wait_for_previous(OVERLAPS)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    num_queries = tl.load(query_start_ptr + sequence + 1) - token
    seq_len = tl.load(seq_lens_ptr + sequence)
    split_keys, first_split, num_splits = _splits_of(seq_len, SPLIT_KEYS, MAX_SPLITS, WINDOW)
    if (num_queries == 1) & (first_split + tl.program_id(0) < num_splits):
        row = tl.arange(0, TILE_ROWS)[:, None]
        dim = tl.arange(0, HALF_PAD)[None, :]
        head = kv_head * GROUP + row
        is_row = row < GROUP
        q_row = q_ptr + token * q_token_stride + head * q_head_stride + dim
        q1 = tl.load(q_row, mask=is_row & (dim < HALF), other=0.0)
        q2 = tl.load(q_row + HALF, mask=is_row & (dim < HALF), other=0.0)
        sink = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
            sink = sink * 1.4426950408889634  # log2(e), as the scores
        for split in range(first_split + tl.program_id(0), num_splits, tl.num_programs(0)):
            first_key = split * split_keys
            if WINDOW:
                first_key = tl.maximum(first_key, tl.maximum(seq_len - WINDOW, 0) // TILE_KEYS * TILE_KEYS)
            sum1, sum2, largest, total = attend_keys(
                q1,
                q2,
                tl.where(split == first_split, sink, float("-inf")),
                first_key,
                tl.minimum(split * split_keys + split_keys, seq_len),
                tl.zeros((TILE_ROWS, 1), tl.int32) + (seq_len - 1),
                kv_head,
                k_pool_ptr,
                v_pool_ptr,
                block_tables_ptr + sequence * table_stride,
                cos_sin_ptr,
                tile_cos,
                tile_sin,
                SCALE,
                NUM_KV_HEADS,
                HALF,
                HALF_PAD,
                BLOCK_SIZE,
                PRECISION,
                WINDOW,
                TILE_ROWS,
                TILE_KEYS,
                TILE_KEYS,
            )
            if num_splits - first_split == 1:
                out_row = out_ptr + (token * (NUM_KV_HEADS * GROUP) + head) * (2 * HALF)
                store_out(sum1, sum2, total, out_row, is_row, HALF, HALF_PAD)
            else:
                index = (sequence * (NUM_KV_HEADS * GROUP) + head) * max_splits + split
                store_part(sum1, sum2, largest, total, index, partial_ptr, stats_ptr, is_row, HALF, HALF_PAD)


@triton.jit(do_not_specialize=["max_splits"])
def _combine_splits(
    partial_ptr,
    stats_ptr,
    seq_lens_ptr,
    query_start_ptr,
    out_ptr,
    max_splits,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TURN_SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum of the splits of one head of one sequence, TURN_SPLITS at a time, counted from its first."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)  # not before: this kernel may start with the last programs of the one in front
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    num_queries = tl.load(query_start_ptr + sequence + 1) - token
    seq_len = tl.load(seq_lens_ptr + sequence)
    _, first_split, num_splits = _splits_of(seq_len, SPLIT_KEYS, MAX_SPLITS, WINDOW)
    if (num_queries == 1) & (num_splits - first_split > 1):
        dim = tl.arange(0, DIM_PAD)[None, :]
        largest = tl.full((1, 1), float("-inf"), tl.float32)
        total = tl.zeros((1, 1), tl.float32)
        out = tl.zeros((1, DIM_PAD), tl.float32)
        for turn in range(first_split, num_splits, TURN_SPLITS):
            split = turn + tl.arange(0, TURN_SPLITS)[:, None]
            is_split = split < num_splits
            index = (sequence * tl.num_programs(1) + head) * max_splits + split
            part = tl.load(partial_ptr + index * HEAD_DIM + dim, mask=is_split & (dim < HEAD_DIM), other=0.0)
            part_largest = tl.load(stats_ptr + index * 2, mask=is_split, other=float("-inf"))
            part_total = tl.load(stats_ptr + index * 2 + 1, mask=is_split, other=0.0)
            # Every split of a decode holds a key that its query sees, so the largest is a number.
            new_largest = tl.maximum(largest, tl.max(part_largest, axis=0, keep_dims=True))
            decay = tl.exp2(largest - new_largest)
            share = tl.exp2(part_largest - new_largest)
            largest = new_largest
            total = total * decay + tl.sum(part_total * share, axis=0, keep_dims=True)
            out = out * decay + tl.sum(part * share, axis=0, keep_dims=True)
        out_row = out_ptr + (token * tl.num_programs(1) + head) * HEAD_DIM + dim
        tl.store(out_row, (out / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
