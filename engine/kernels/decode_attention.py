"""Attention of sequences with one query (decodes), in equal shares (after flash decoding: Dao et al. 2023).

The keys of all decodes of a step lie in one row of tiles, and every program of a KV head takes the same
number of tiles of it, however many sequences there are and however long they are: one wave of programs,
which begin and end together. A sequence within one share is finished there; one that is cut leaves a piece
in each share that it reaches, and a second launch adds them up in order. So where a sequence is cut, and
with that its last bits, follows from the lengths of all decodes of a step: see `invariant_attention`.
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
from dayshift.engine.kernels.launch import (
    let_next_begin,
    num_processors,
    overlap_options,
    padded,
    wait_for_previous,
)

_TILE_KEYS = 32
_LEAST_TILES = 8  # of a share, unless no sequence has as many: a piece of fewer costs what it saves
_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply
_PROCESSOR_WARPS = 8  # that a processor holds at once, when each takes all the registers it may
_TURN_PIECES = 8  # added up at once
_MIN_SEQUENCES = 32  # whose lengths a program reads at once: few sizes of batches are compiled for


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
    batch = len(seq_lens)
    is_wide = q.dtype == torch.float32  # takes twice the registers and shared memory
    num_warps = 8 if is_wide else 2 if constants["HALF_PAD"] <= 64 else 4
    num_places = num_processors(q.device) * (_PROCESSOR_WARPS // num_warps)
    most_tiles = batch * triton.cdiv(block_tables.shape[1] * block_size, _TILE_KEYS)
    num_shares = min(max(1, num_places // num_kv_heads), max(batch, triton.cdiv(most_tiles, _LEAST_TILES)))
    partial = q.new_empty((num_shares, 2, num_heads, head_dim), dtype=torch.float32)
    stats = q.new_empty((num_shares, 2, num_heads, 2), dtype=torch.float32)
    sequences = {
        "SEQUENCES": 1 if batch == 1 else padded(batch, _MIN_SEQUENCES),
        "WINDOW": constants["WINDOW"],
        "TILE_KEYS": _TILE_KEYS,
        "LEAST_TILES": _LEAST_TILES,
    }
    _attend_share[(num_kv_heads, num_shares)](
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
        batch,
        block_tables.stride(0),
        q.stride(0),
        q.stride(1),
        len(cos_sin),
        **(constants | sequences),
        HAS_SINKS=sinks is not None,
        TILE_ROWS=padded(constants["GROUP"], _MIN_DOT),
        num_warps=num_warps,
        num_stages=1 if is_wide else 3,
        **overlap_options(q.device),
    )
    _add_pieces[(batch, num_heads)](
        partial,
        stats,
        seq_lens,
        query_start,
        out,
        batch,
        num_shares,
        HEAD_DIM=head_dim,
        DIM_PAD=padded(head_dim),
        TURN_PIECES=_TURN_PIECES,
        **sequences,
        num_warps=1,
        **overlap_options(q.device),
    )


@triton.jit
def _row_of_tiles(
    sequence,
    num_shares,
    seq_lens_ptr,
    query_start_ptr,
    batch,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
):
    """Tiles of keys that the query of each `sequence` sees, those of all sequences, and those of a share.

    A sequence with several queries has none here, nor has one that only pads the batch.
    """
    is_sequence = sequence < batch
    start = tl.load(query_start_ptr + sequence, mask=is_sequence, other=0)
    end = tl.load(query_start_ptr + sequence + 1, mask=is_sequence, other=0)
    seq_len = tl.load(seq_lens_ptr + sequence, mask=is_sequence, other=0)
    tiles = tl.cdiv(seq_len, TILE_KEYS)
    if WINDOW:
        tiles -= tl.maximum(seq_len - WINDOW, 0) // TILE_KEYS
    tiles = tl.where(end - start == 1, tiles, 0)
    total = tl.sum(tiles, 0)
    least = tl.maximum(tl.minimum(tl.max(tiles, 0), LEAST_TILES), 1)
    return tiles, total, tl.maximum(tl.cdiv(total, num_shares), least)


@triton.jit(do_not_specialize=["batch", "table_stride", "num_positions"])
def _attend_share(
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
    batch,
    table_stride,
    q_token_stride,
    q_head_stride,
    num_positions,
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
    TILE_KEYS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A share of the tiles of all sequences with one query, for the GROUP heads of one KV head.

    Writes the output of a sequence that ends where it began, in this share. A piece of another one, its
    sums, largest score and sum of exponentials, is left at (share, 0, head) if the share begins with it, at
    (share, 1, head) otherwise: there it ends.
    """
    let_next_begin(OVERLAPS)
    tile_cos, tile_sin = angles_of_tile(cos_sin_ptr, num_positions, HALF, HALF_PAD, TILE_KEYS)
    wait_for_previous(OVERLAPS)
    # The KV heads of a share, which read the same rows of the pool, are neighbours in the grid.
    kv_head, share = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, TILE_ROWS)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    head = kv_head * GROUP + row
    is_row = row < GROUP
    tiles, total, share_tiles = _row_of_tiles(
        tl.arange(0, SEQUENCES),
        tl.num_programs(1),
        seq_lens_ptr,
        query_start_ptr,
        batch,
        WINDOW,
        TILE_KEYS,
        LEAST_TILES,
    )
    ends = tl.cumsum(tiles, 0)  # of the sequences, in the row of all tiles
    first_tile = share * share_tiles
    end_tile = tl.minimum(first_tile + share_tiles, total)
    tile = first_tile
    while tile < end_tile:
        sequence = tl.sum((ends <= tile).to(tl.int32), 0)
        sequence_start = tl.max(tl.where(ends <= tile, ends, 0), 0)
        sequence_end = tl.min(tl.where(ends <= tile, total, ends), 0)
        piece_end = tl.minimum(sequence_end, end_tile)
        token = tl.load(query_start_ptr + sequence).to(tl.int64)
        seq_len = tl.load(seq_lens_ptr + sequence)
        first_key = (tile - sequence_start) * TILE_KEYS
        if WINDOW:
            first_key += tl.maximum(seq_len - WINDOW, 0) // TILE_KEYS * TILE_KEYS
        q_row = q_ptr + token * q_token_stride + head * q_head_stride + dim
        sink = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row & (tile == sequence_start), other=float("-inf"))
            sink = sink.to(tl.float32) * 1.4426950408889634  # log2(e), as the scores
        sum1, sum2, largest, total_weight = attend_keys(
            tl.load(q_row, mask=is_row & (dim < HALF), other=0.0),
            tl.load(q_row + HALF, mask=is_row & (dim < HALF), other=0.0),
            sink,
            first_key,
            tl.minimum(first_key + (piece_end - tile) * TILE_KEYS, seq_len),
            tl.zeros((TILE_ROWS, 1), tl.int32) + (seq_len - 1),
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
            TILE_KEYS,
            PACKED,
        )
        if (tile == sequence_start) & (piece_end == sequence_end):
            out_row = out_ptr + (token * (NUM_KV_HEADS * GROUP) + head) * (2 * HALF)
            store_out(sum1, sum2, total_weight, out_row, is_row, HALF, HALF_PAD)
        else:
            place = share * 2 + (tile > first_tile).to(tl.int32)
            index = place * (NUM_KV_HEADS * GROUP) + head
            store_part(
                sum1, sum2, largest, total_weight, index, partial_ptr, stats_ptr, is_row, HALF, HALF_PAD
            )
        tile = piece_end


@triton.jit(do_not_specialize=["batch", "num_shares"])
def _add_pieces(
    partial_ptr,
    stats_ptr,
    seq_lens_ptr,
    query_start_ptr,
    out_ptr,
    batch,
    num_shares,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TURN_PIECES: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    SEQUENCES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Sum of the pieces of one head of one sequence, TURN_PIECES at a time, counted from its first. Zeros for
    a sequence of no keys, which pads a batch."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)  # not before: this kernel may start with the last programs of the one in front
    sequence, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    other = tl.arange(0, SEQUENCES)
    tiles, _, share_tiles = _row_of_tiles(
        other, num_shares, seq_lens_ptr, query_start_ptr, batch, WINDOW, TILE_KEYS, LEAST_TILES
    )
    first_tile = tl.sum(tl.where(other < sequence, tiles, 0), 0)
    num_tiles = tl.sum(tl.where(other == sequence, tiles, 0), 0)
    first_share = first_tile // share_tiles
    end_share = tl.where(num_tiles > 0, tl.cdiv(first_tile + num_tiles, share_tiles), first_share)
    token = tl.load(query_start_ptr + sequence).to(tl.int64)
    num_queries = tl.load(query_start_ptr + sequence + 1) - token
    if (num_queries == 1) & (end_share - first_share != 1):
        dim = tl.arange(0, DIM_PAD)[None, :]
        largest = tl.full((1, 1), float("-inf"), tl.float32)
        total = tl.zeros((1, 1), tl.float32)
        out = tl.zeros((1, DIM_PAD), tl.float32)
        for turn in range(first_share, end_share, TURN_PIECES):
            share = turn + tl.arange(0, TURN_PIECES)[:, None]
            is_piece = share < end_share
            # Only the first share that a sequence reaches may begin with another one.
            place = share * 2 + (share * share_tiles < first_tile).to(tl.int32)
            index = place * num_heads + head
            part = tl.load(partial_ptr + index * HEAD_DIM + dim, mask=is_piece & (dim < HEAD_DIM), other=0.0)
            part_largest = tl.load(stats_ptr + index * 2, mask=is_piece, other=float("-inf"))
            part_total = tl.load(stats_ptr + index * 2 + 1, mask=is_piece, other=0.0)
            # Every piece of a decode holds a key that its query sees, so the largest is a number.
            new_largest = tl.maximum(largest, tl.max(part_largest, axis=0, keep_dims=True))
            decay = tl.exp2(largest - new_largest)
            weight = tl.exp2(part_largest - new_largest)
            largest = new_largest
            total = total * decay + tl.sum(part_total * weight, axis=0, keep_dims=True)
            out = out * decay + tl.sum(part * weight, axis=0, keep_dims=True)
        out_row = out_ptr + (token * num_heads + head) * HEAD_DIM + dim
        total = tl.where(total == 0.0, 1.0, total)
        tl.store(out_row, (out / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
