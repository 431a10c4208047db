"""Attention of a few sequences with one query each, in one launch with all that lies between projections.

That is what three launches are otherwise, or four: the norms of queries and keys, rotation, the store into
the pool, attention, and the fixed-point numbers (`quantized_inputs`) of an output projection that is
quantised. The keys of a sequence are cut into tiles for as many programs as run side by side, because a tile
takes longer to arrive than to compute; the last programs of a KV head add their pieces up (`token_pieces`).
What lies in the pool was written by an earlier step: it is asked for before the product in front has ended,
and the new token's keys and values are put in from registers. The kernel behind may begin at once, and ask
for its weights.

`reference.norm_rope_store_kv`, `rope_store_kv` and `paged_attention` specify it.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.attention_tiles import angles_of_tile
from dayshift.engine.kernels.launch import (
    let_next_begin,
    num_processors,
    overlap_options,
    padded,
    wait_for_previous,
)
from dayshift.engine.kernels.quantized_inputs import FixedPoint, empty_points
from dayshift.engine.kernels.token_pieces import finish, share_piece, sink_scores
from dayshift.engine.quant.packed import LANE

_TILE_KEYS = 32
_MAX_SHARES = 64  # of a sequence
_PROCESSOR_PROGRAMS = 2  # side by side
_MAX_TOKENS = 4  # of more, equal shares of all keys are the faster way
_MAX_HALF = 64  # of a head; larger ones do not fit into the registers
_MAX_HEADS = 512
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What a layer does with its heads."""

    scale: float  # on the scores
    window: int | None
    sinks: torch.Tensor | None  # (num_heads,)
    norms: tuple[torch.Tensor, torch.Tensor] | None  # of queries and keys, (head_dim,)
    eps: float


def can_attend(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    k_pool: torch.Tensor,
    block_tables: torch.Tensor,
) -> bool:
    """There is one query for each of a few sequences."""
    num_kv_heads = k_pool.shape[2]
    half = head_dim // 2
    return (
        num_tokens == len(block_tables) <= _MAX_TOKENS
        and dtype == k_pool.dtype
        and half == padded(half, LANE) <= _MAX_HALF
        and num_heads // num_kv_heads <= 16
    )


def attend_to_points(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Heads,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cos_sin: torch.Tensor,
) -> FixedPoint:
    """As `attend`, for a projection that is quantised."""
    points = empty_points(q, q.shape[1] * q.shape[2])
    out = (points.parts.view(torch.int8), points.steps, points.sums)
    place = (slot_mapping, block_tables, seq_lens, cos_sin)
    _launch((q, k, v), heads, (k_pool, v_pool), place, out, points.num_parts)
    return points


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: Heads,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cos_sin: torch.Tensor,
) -> torch.Tensor:
    """Store the tokens' keys and values, and attend, (num_tokens, num_heads * head_dim); zeros for tokens
    that pad a batch.

    q, k, v: (num_tokens, heads, head_dim), heads and dimensions contiguous, for which `can_attend`; all else
    as in `reference.paged_attention`. What others wrote into `block_tables`, `seq_lens`, `slot_mapping` and
    the pool has to be there before the kernel in front begins.
    """
    y = q.new_empty((len(q), q.shape[1] * q.shape[2]))
    _launch((q, k, v), heads, (k_pool, v_pool), (slot_mapping, block_tables, seq_lens, cos_sin), (y,), 0)
    return y


def _launch(
    new: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: Heads,
    pools: tuple[torch.Tensor, torch.Tensor],
    place: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out: tuple[torch.Tensor, ...],
    num_parts: int,
) -> None:
    q, k, v = new
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size, device = k.shape[1], pools[0].shape[1], q.device
    block_tables, cos_sin = place[1], place[3]
    num_rows, processors = num_tokens * num_kv_heads, num_processors(device)
    num_tiles = triton.cdiv(block_tables.shape[1] * block_size, _TILE_KEYS)
    num_shares = min(_MAX_SHARES, num_tiles, max(1, _PROCESSOR_PROGRAMS * processors // num_rows))
    group = num_heads // num_kv_heads
    sums = q.new_empty((num_tokens, num_shares, num_heads, head_dim), dtype=torch.float32)
    stats = q.new_empty((num_tokens, num_shares, num_heads, 2), dtype=torch.float32)
    q_norm, k_norm = heads.norms or (q, q)  # not read without
    _attend_token[(num_kv_heads, num_shares, num_tokens)](
        new,
        (q_norm, k_norm),
        pools,
        place,
        q if heads.sinks is None else heads.sinks,
        (sums, stats, _counters(device)),
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        block_tables.stride(0),
        len(cos_sin),
        heads.eps,
        SCALE=heads.scale * _LOG2_E,
        WINDOW=heads.window or 0,
        HAS_NORMS=heads.norms is not None,
        HAS_SINKS=heads.sinks is not None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        NUM_PARTS=num_parts,
        NUM_SHARES=num_shares,
        # Those who wait for others leave most processors free, so that these find a place.
        ADDERS=min(group, 1 + processors // 4 // num_rows),
        NUM_PIECES=padded(num_shares),
        TILE_KEYS=_TILE_KEYS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        **overlap_options(device),
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """How many shares of a KV head are done. Zero between launches: the last program sees to it."""
    return torch.zeros(_MAX_TOKENS * _MAX_HEADS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_positions"])
def _attend_token(
    new,  # queries, keys, values
    norms,  # of queries and keys
    pools,  # keys, values
    place,  # slots, block tables, lengths, cosines and sines
    sinks_ptr,
    pieces,  # sums, their largest scores and totals, counters
    out,  # rows, or parts, steps and sums of fixed-point numbers
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    num_positions,
    eps,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,  # of the fixed-point numbers; 0: rows
    NUM_SHARES: tl.constexpr,
    ADDERS: tl.constexpr,
    NUM_PIECES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A share of a sequence's tiles for the GROUP heads of one KV head."""
    kv_head, share, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq_len = tl.load(place[2] + token)
    position = tl.maximum(seq_len - 1, 0)
    first_tile = 0
    if WINDOW:
        first_tile = tl.maximum(seq_len - WINDOW, 0) // TILE_KEYS
    num_tiles = tl.cdiv(seq_len, TILE_KEYS) - first_tile
    share_tiles = tl.maximum(tl.cdiv(num_tiles, NUM_SHARES), 1)
    num_shares = tl.maximum(tl.cdiv(num_tiles, share_tiles), 1)  # that have tiles, or one without any
    if share < num_shares:
        tile = first_tile + share * share_tiles
        end_tile = tl.minimum(tile + share_tiles, first_tile + num_tiles)
        dim = tl.arange(0, HALF)[None, :]
        row = tl.arange(0, 16)[:, None]
        head = kv_head * GROUP + row
        is_row = row < GROUP
        # All of this was there before the product in front of this kernel began.
        slot = tl.load(place[0] + token)
        table = place[1] + token * table_stride
        blocks = _block_ids(tile, end_tile, position, table, BLOCK_SIZE, TILE_KEYS)
        raw1, raw2, v1, v2, first_cos, first_sin = _load_tile(
            tile,
            end_tile,
            position,
            blocks,
            kv_head,
            pools,
            place[3],
            NUM_KV_HEADS,
            HALF,
            BLOCK_SIZE,
            TILE_KEYS,
        )
        blocks = _block_ids(tile + 1, end_tile, position, table, BLOCK_SIZE, TILE_KEYS)
        tile_cos, tile_sin = angles_of_tile(place[3], num_positions, HALF, HALF, TILE_KEYS)
        angle = place[3] + position.to(tl.int64) * (2 * HALF) + dim
        new_cos, new_sin = tl.load(angle), tl.load(angle + HALF)
        q_norm1, q_norm2, k_norm1, k_norm2 = 1.0, 1.0, 1.0, 1.0
        if HAS_NORMS:
            q_norm1, q_norm2 = (
                tl.load(norms[0] + dim).to(tl.float32),
                tl.load(norms[0] + HALF + dim).to(tl.float32),
            )
            k_norm1, k_norm2 = (
                tl.load(norms[1] + dim).to(tl.float32),
                tl.load(norms[1] + HALF + dim).to(tl.float32),
            )
        sink = tl.full((16, 1), float("-inf"), tl.float32)
        if HAS_SINKS:
            sink = sink_scores(sinks_ptr + head, is_row)
        let_next_begin(OVERLAPS)
        wait_for_previous(OVERLAPS)

        q_row = new[0] + token.to(tl.int64) * q_stride + head * (2 * HALF) + dim
        k_row = new[1] + token.to(tl.int64) * k_stride + kv_head * (2 * HALF) + dim
        v_row = new[2] + token.to(tl.int64) * v_stride + kv_head * (2 * HALF) + dim
        q1, q2 = tl.load(q_row, is_row, other=0.0), tl.load(q_row + HALF, is_row, other=0.0)
        k1, k2 = tl.load(k_row), tl.load(k_row + HALF)
        new_v1, new_v2 = tl.load(v_row), tl.load(v_row + HALF)
        if HAS_NORMS:
            q1, q2 = _normed(q1, q2, q_norm1, q_norm2, eps, HALF)
            k1, k2 = _normed(k1, k2, k_norm1, k_norm2, eps, HALF)
        q1, q2 = _rotated(q1, q2, new_cos, new_sin)
        if (end_tile == first_tile + num_tiles) & (slot >= 0):
            to = (slot * NUM_KV_HEADS + kv_head) * (2 * HALF) + dim
            tl.store(pools[0] + to, k1)
            tl.store(pools[0] + to + HALF, k2)
            tl.store(pools[1] + to, new_v1)
            tl.store(pools[1] + to + HALF, new_v2)

        largest = tl.full((16, 1), float("-inf"), tl.float32)
        total = tl.zeros((16, 1), tl.float32)
        sum1 = tl.zeros((16, HALF), tl.float32)
        sum2 = tl.zeros((16, HALF), tl.float32)
        while tile < end_tile:
            # The next tile is asked for before this one is used, and where the one after it is.
            next1, next2, next_v1, next_v2, next_cos, next_sin = _load_tile(
                tile + 1,
                end_tile,
                position,
                blocks,
                kv_head,
                pools,
                place[3],
                NUM_KV_HEADS,
                HALF,
                BLOCK_SIZE,
                TILE_KEYS,
            )
            blocks = _block_ids(tile + 2, end_tile, position, table, BLOCK_SIZE, TILE_KEYS)
            key = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
            is_new = (key == position)[:, None]
            raw1, raw2 = tl.where(is_new, k1, raw1), tl.where(is_new, k2, raw2)
            v1, v2 = tl.where(is_new, new_v1, v1), tl.where(is_new, new_v2, v2)
            cos = tile_cos * first_cos - tile_sin * first_sin
            sin = tile_sin * first_cos + tile_cos * first_sin
            key1, key2 = _rotated(raw1, raw2, cos, sin)
            scores = tl.dot(q1, tl.trans(key1), input_precision=PRECISION)
            scores = tl.dot(q2, tl.trans(key2), scores, input_precision=PRECISION)
            is_visible = key <= position
            if WINDOW:
                is_visible = is_visible & (key > position - WINDOW)
            scores = tl.where(is_visible[None, :], scores * SCALE, float("-inf"))
            new_largest = tl.maximum(
                largest, tl.max(scores, axis=1, keep_dims=True)
            )  # every tile is seen in part
            decay = tl.exp2(largest - new_largest)
            weights = tl.exp2(scores - new_largest)
            largest = new_largest
            total = total * decay + tl.sum(weights, axis=1, keep_dims=True)
            rounded = weights.to(v1.dtype)
            sum1 = tl.dot(rounded, v1, sum1 * decay, input_precision=PRECISION)
            sum2 = tl.dot(rounded, v2, sum2 * decay, input_precision=PRECISION)
            raw1, raw2, v1, v2, first_cos, first_sin = next1, next2, next_v1, next_v2, next_cos, next_sin
            tile += 1
        if num_shares == 1:
            finish(
                sum1,
                sum2,
                largest,
                total,
                sink,
                row,
                kv_head,
                token,
                out,
                NUM_KV_HEADS,
                GROUP,
                HALF,
                NUM_PARTS,
            )
        else:
            share_piece(
                sum1,
                sum2,
                largest,
                total,
                share,
                num_shares,
                kv_head,
                token,
                sinks_ptr,
                pieces,
                out,
                HAS_SINKS,
                NUM_KV_HEADS,
                GROUP,
                HALF,
                NUM_PARTS,
                NUM_SHARES,
                ADDERS,
                NUM_PIECES,
            )


@triton.jit
def _block_ids(tile, end_tile, position, table, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """The blocks of a tile's keys that are in front of `position`; of none from `end_tile` on."""
    key = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    return tl.load(table + key // BLOCK_SIZE, (key < position) & (tile < end_tile), other=0)


@triton.jit
def _load_tile(
    tile,
    end_tile,
    position,
    blocks,
    kv_head,
    pools,
    cos_sin_ptr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Both halves of keys and values from the pool, of those in front of `position`, and of no tile from
    `end_tile` on; cosines and sines of the first key."""
    key = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    is_old = (key < position) & (tile < end_tile)
    slot = blocks.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    dim = tl.arange(0, HALF)[None, :]
    at = (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + dim
    is_old = is_old[:, None]
    angle = cos_sin_ptr + tl.minimum(tile * TILE_KEYS, position).to(tl.int64) * (2 * HALF) + dim
    return (
        tl.load(pools[0] + at, is_old, other=0.0),
        tl.load(pools[0] + at + HALF, is_old, other=0.0),
        tl.load(pools[1] + at, is_old, other=0.0),
        tl.load(pools[1] + at + HALF, is_old, other=0.0),
        tl.load(angle),
        tl.load(angle + HALF),
    )


@triton.jit
def _rotated(x1, x2, cos, sin):
    """Both halves of heads, rotated."""
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    return (wide1 * cos - wide2 * sin).to(x1.dtype), (wide2 * cos + wide1 * sin).to(x1.dtype)


@triton.jit
def _normed(x1, x2, weight1, weight2, eps, HALF: tl.constexpr):
    """Both halves of heads (heads, HALF), normed."""
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    squares = tl.sum(wide1 * wide1 + wide2 * wide2, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)
    return (wide1 * scale * weight1).to(x1.dtype), (wide2 * scale * weight2).to(x1.dtype)
