"""Attention of sequences with several queries in a step (prefill chunks) over what the pool holds.

Flash attention (Dao, arXiv:2307.08691): the heads that share a KV head are rows of one tile with its
queries, so that a key is loaded and rotated once for all of them. A short chunk over a long past (the
next turn of a session, a draft to verify) has few tiles; its keys are cut into splits, which the last
program of a tile to finish adds up in order. How many follows from the sequence alone.
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

from dayshift.engine.kernels.attention_tiles import (
    angles_of_tile,
    attend_keys,
    sequence_of_tile,
    store_out,
    store_part,
)
from dayshift.engine.kernels.launch import padded

_TILE_ROWS = 64
_SPLIT_KEYS = 256  # the least
_MAX_SPLITS = 8
_SEQUENCE_PROGRAMS = 256  # what splits bring a sequence's tiles to: two on each processor of an H200
_NUM_PROGRAMS = 2048  # most of them idle: what a chunk needs is not known when they are launched
_MAX_SPLIT_TOKENS = 2048  # larger steps fill the GPU by themselves, and would need GBs for the splits


def attend_chunks(
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
    """Fill the rows of `out` whose sequences have several queries; the arguments of `paged_attention`.

    `constants`: the compile-time constants that follow from the model.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    batch = len(seq_lens)
    is_wide = q.dtype == torch.float32 or head_dim > 128  # takes twice the registers and shared memory
    tile_rows = padded(constants["GROUP"], _TILE_ROWS)
    tile_queries = tile_rows // constants["GROUP"]
    num_tiles = num_tokens // tile_queries + batch
    max_splits = 1
    if num_tokens <= _MAX_SPLIT_TOKENS:
        max_splits = min(_MAX_SPLITS, -(-block_tables.shape[1] * block_size // _SPLIT_KEYS))
    can_split = max_splits > 1
    partial = stats = arrived = out  # never touched without splits
    if can_split:
        partial = q.new_empty((num_tokens, num_heads, max_splits, head_dim), dtype=torch.float32)
        stats = q.new_empty((num_tokens, num_heads, max_splits, 2), dtype=torch.float32)
        arrived = q.new_zeros((num_tiles, num_kv_heads), dtype=torch.int32)
    num_programs = min(max_splits, max(2, _NUM_PROGRAMS // (num_tiles * num_kv_heads)))  # for a tile
    _attend_tile[(num_tiles, num_kv_heads, num_programs)](
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
        arrived,
        batch,
        block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        len(cos_sin),
        max_splits,
        **constants,
        HAS_SINKS=sinks is not None,
        TILE_ROWS=tile_rows,
        TILE_QUERIES=tile_queries,
        TILE_KEYS=32 if is_wide else 64,
        SPLIT_KEYS=_SPLIT_KEYS if can_split else 0,
        MAX_SPLITS=_MAX_SPLITS,
        SEQUENCE_PROGRAMS=_SEQUENCE_PROGRAMS,
        num_warps=8 if is_wide else 4,
        num_stages=1 if q.dtype == torch.float32 else 2,
    )


@triton.jit(do_not_specialize=["batch", "table_stride", "num_positions", "max_splits"])
def _attend_tile(
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
    arrived_ptr,
    batch,
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
    PACKED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SEQUENCE_PROGRAMS: tl.constexpr,
):
    """Some splits of the keys that TILE_QUERIES queries of a sequence see, times the GROUP heads of a KV
    head. All the keys at once where SPLIT_KEYS is 0."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = sequence_of_tile(tile, query_start_ptr, batch, TILE_QUERIES)
    first_token = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_query = (tile - first_token // TILE_QUERIES - sequence) * TILE_QUERIES
    num_before = seq_len - num_queries
    end_key = tl.minimum(num_before + first_query + TILE_QUERIES, seq_len)
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(num_before + first_query + 1 - WINDOW, 0) // TILE_KEYS * TILE_KEYS
    split_keys = tl.maximum(end_key, 1)
    if SPLIT_KEYS:
        num_programs = tl.cdiv(num_queries, TILE_QUERIES) * NUM_KV_HEADS
        most = tl.minimum(tl.maximum(SEQUENCE_PROGRAMS // tl.maximum(num_programs, 1), 1), MAX_SPLITS)
        split_keys = SPLIT_KEYS * tl.maximum(tl.cdiv(seq_len, SPLIT_KEYS * most), 1)
    first_split = first_key // split_keys
    num_splits = tl.maximum(tl.cdiv(end_key, split_keys), first_split + 1)
    is_busy = first_split + tl.program_id(2) < num_splits
    if (num_queries > 1) & (first_query < num_queries) & is_busy:
        row = tl.arange(0, TILE_ROWS)[:, None]
        dim = tl.arange(0, HALF_PAD)[None, :]
        query = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = (row < TILE_QUERIES * GROUP) & (query < num_queries)
        token = (first_token + query).to(tl.int64)
        q_row = q_ptr + token * q_token_stride + head * q_head_stride + dim
        q1 = tl.load(q_row, mask=is_row & (dim < HALF), other=0.0)
        q2 = tl.load(q_row + HALF, mask=is_row & (dim < HALF), other=0.0)
        tile_cos, tile_sin = angles_of_tile(cos_sin_ptr, num_positions, HALF, HALF_PAD, TILE_KEYS)
        index = token * (NUM_KV_HEADS * GROUP) + head
        sink = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32)
            sink = sink * 1.4426950408889634  # log2(e), as the scores
        for split in range(first_split + tl.program_id(2), num_splits, tl.num_programs(2)):
            sum1, sum2, largest, total = attend_keys(
                q1,
                q2,
                tl.where(split == first_split, sink, float("-inf")),
                tl.maximum(split * split_keys, first_key),
                tl.minimum(split * split_keys + split_keys, end_key),
                num_before + query,
                kv_head,
                k_pool_ptr,
                v_pool_ptr,
                block_tables_ptr + sequence.to(tl.int64) * table_stride,
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
                1,
                PACKED,
            )
            if (SPLIT_KEYS == 0) | (num_splits - first_split == 1):  # without splits known to the compiler
                store_out(sum1, sum2, total, out_ptr + index * (2 * HALF), is_row, HALF, HALF_PAD)
            elif SPLIT_KEYS:
                part = index * max_splits + split
                store_part(sum1, sum2, largest, total, part, partial_ptr, stats_ptr, is_row, HALF, HALF_PAD)
        if SPLIT_KEYS and num_splits - first_split > 1:
            tl.debug_barrier()  # what all threads stored is counted by the one that counts
            arrived = tl.atomic_add(arrived_ptr + tile * NUM_KV_HEADS + kv_head, 1, sem="acq_rel")
            if arrived == tl.minimum(num_splits - first_split, tl.num_programs(2)) - 1:
                splits = first_split, num_splits, max_splits
                _add_splits(index, splits, partial_ptr, stats_ptr, out_ptr, is_row, HALF, HALF_PAD, TILE_ROWS)


@triton.jit
def _add_splits(
    index,
    splits,
    partial_ptr,
    stats_ptr,
    out_ptr,
    is_row,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Add up the splits of a tile's rows, one after the other, and store the output.

    `splits`: the first, the end, and the room for each row. `index`: (TILE_ROWS, 1) rows of the output.
    """
    first_split, num_splits, max_splits = splits
    dim = tl.arange(0, HALF_PAD)[None, :]
    largest = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((TILE_ROWS, 1), tl.float32)
    sum1 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    sum2 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    for split in range(first_split, num_splits):
        place = index * max_splits + split
        part = partial_ptr + place * (2 * HALF) + dim
        # Other programs wrote these: they are in the second cache, never in this processor's own.
        part_largest = tl.load(stats_ptr + place * 2, mask=is_row, other=0.0, cache_modifier=".cg")
        part_total = tl.load(stats_ptr + place * 2 + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        part1 = tl.load(part, mask=is_row & (dim < HALF), other=0.0, cache_modifier=".cg")
        part2 = tl.load(part + HALF, mask=is_row & (dim < HALF), other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, part_largest)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # a row that saw no key yet
        decay = tl.exp2(largest - base)
        share = tl.exp2(part_largest - base)
        largest = new_largest
        total = total * decay + part_total * share
        sum1 = sum1 * decay + part1 * share
        sum2 = sum2 * decay + part2 * share
    store_out(sum1, sum2, total, out_ptr + index * (2 * HALF), is_row, HALF, HALF_PAD)
