"""Attention of a few sequences with one query each, whose output is the input of a quantised product.

One launch does what are four otherwise: the norms of queries and keys, rotation, the store into the pool,
attention, and the fixed-point numbers (`quantized_inputs`). The keys of a sequence are cut into tiles for as
many programs, because a tile takes longer to arrive than to compute; the last program of a KV head adds their
pieces up. What lies in the pool was written by an earlier step: it is asked for before the product in front
has ended, and the new token's keys and values are put in from registers.

`reference.norm_rope_store_kv`, `rope_store_kv` and `paged_attention` specify it.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803, N806
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous
from dayshift.engine.kernels.quantized_inputs import FixedPoint, empty_points, store_points
from dayshift.engine.quant.packed import LANE

_TILE_KEYS = 32
_MAX_SHARES = 32  # of a sequence
_MAX_TOKENS = 4
_MAX_HALF = 64  # of a head; larger ones do not fit into the registers
_MAX_CONTEXT = 2560  # longer ones are read by more programs than one can add up
_TURN_PIECES = 8  # added up at once
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
    """There is one query for each of a few sequences, and none of these is long."""
    _, block_size, num_kv_heads, _ = k_pool.shape
    half = head_dim // 2
    return (
        num_tokens == len(block_tables) <= _MAX_TOKENS
        and block_tables.shape[1] * block_size <= _MAX_CONTEXT
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
    """Store the tokens' keys and values, and attend; zeros for tokens that pad a batch.

    q, k, v: (num_tokens, heads, head_dim), heads and dimensions contiguous, for which `can_attend`; all else
    as in `reference.paged_attention`. What others wrote into `block_tables`, `seq_lens`, `slot_mapping` and
    the pool has to be there before the kernel in front begins.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size, device = k.shape[1], k_pool.shape[1], q.device
    num_tiles = triton.cdiv(block_tables.shape[1] * block_size, _TILE_KEYS)
    num_shares = min(_MAX_SHARES, num_tiles)
    points = empty_points(q, num_heads * head_dim)
    sums = q.new_empty((num_tokens, num_shares, num_heads, head_dim), dtype=torch.float32)
    stats = q.new_empty((num_tokens, num_shares, num_heads, 2), dtype=torch.float32)
    q_norm, k_norm = heads.norms or (q, q)  # not read without
    group = num_heads // num_kv_heads
    _attend_token[(num_kv_heads, num_shares, num_tokens)](
        (q, k, v),
        (q_norm, k_norm),
        (k_pool, v_pool),
        (slot_mapping, block_tables, seq_lens, cos_sin),
        q if heads.sinks is None else heads.sinks,
        (sums, stats, _counters(device)),
        (points.parts.view(torch.int8), points.steps, points.sums),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        block_tables.stride(0),
        heads.eps,
        SCALE=heads.scale * _LOG2_E,
        WINDOW=heads.window or 0,
        HAS_NORMS=heads.norms is not None,
        HAS_SINKS=heads.sinks is not None,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=padded(group),
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        NUM_PARTS=points.num_parts,
        NUM_SHARES=num_shares,
        TILE_KEYS=_TILE_KEYS,
        TURN_PIECES=_TURN_PIECES,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        **overlap_options(device),
    )
    return points


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """How many shares of a KV head are done. Zero between launches: the last program sees to it."""
    return torch.zeros(_MAX_TOKENS * _MAX_HEADS, dtype=torch.int32, device=device)


@triton.jit
def _attend_token(
    new,  # queries, keys, values
    norms,  # of queries and keys
    pools,  # keys, values
    place,  # slots, block tables, lengths, cosines and sines
    sinks_ptr,
    pieces,  # sums, their largest scores and totals, counters
    points,  # parts, steps, sums
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    eps,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    TURN_PIECES: tl.constexpr,
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
        raw1, raw2, v1, v2, cos, sin = _load_tile(
            tile,
            position,
            kv_head,
            pools,
            place,
            token * table_stride,
            NUM_KV_HEADS,
            HALF,
            BLOCK_SIZE,
            TILE_KEYS,
        )
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
            sink = (
                tl.load(sinks_ptr + head, mask=is_row, other=float("-inf")).to(tl.float32)
                * 1.4426950408889634
            )
        wait_for_previous(OVERLAPS)
        let_next_begin(OVERLAPS)

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
            key = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
            is_new = (key == position)[:, None]
            raw1, raw2 = tl.where(is_new, k1, raw1), tl.where(is_new, k2, raw2)
            v1, v2 = tl.where(is_new, new_v1, v1), tl.where(is_new, new_v2, v2)
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
            tile += 1
            if tile < end_tile:
                raw1, raw2, v1, v2, cos, sin = _load_tile(
                    tile,
                    position,
                    kv_head,
                    pools,
                    place,
                    token * table_stride,
                    NUM_KV_HEADS,
                    HALF,
                    BLOCK_SIZE,
                    TILE_KEYS,
                )
        if num_shares == 1:
            _finish(
                sum1, sum2, largest, total, sink, kv_head, token, points, NUM_KV_HEADS, GROUP, HALF, NUM_PARTS
            )
        else:
            NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
            piece = (token * NUM_SHARES + share) * NUM_HEADS + head
            to = pieces[0] + piece * (2 * HALF) + dim
            tl.store(to, sum1, is_row, cache_modifier=".cg")
            tl.store(to + HALF, sum2, is_row, cache_modifier=".cg")
            tl.store(pieces[1] + piece * 2, largest, is_row, cache_modifier=".cg")
            tl.store(pieces[1] + piece * 2 + 1, total, is_row, cache_modifier=".cg")
            tl.debug_barrier()  # all of a piece is stored before it is counted
            counter = pieces[2] + token * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_shares - 1:
                tl.store(counter, 0)
                _add_pieces(
                    num_shares,
                    kv_head,
                    token,
                    sinks_ptr,
                    pieces,
                    points,
                    HAS_SINKS,
                    NUM_KV_HEADS,
                    GROUP,
                    GROUP_PAD,
                    HALF,
                    NUM_PARTS,
                    NUM_SHARES,
                    TURN_PIECES,
                )


@triton.jit
def _load_tile(
    tile,
    position,
    kv_head,
    pools,
    place,
    table_start,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Both halves of keys and values from the pool, of those in front of `position`; cosines and sines."""
    key = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    is_old = key < position
    block = tl.load(place[1] + table_start + key // BLOCK_SIZE, is_old, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
    dim = tl.arange(0, HALF)[None, :]
    at = (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + dim
    is_old = is_old[:, None]
    angle = place[3] + tl.minimum(key, position)[:, None] * (2 * HALF) + dim
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


@triton.jit
def _add_pieces(
    num_shares,
    kv_head,
    token,
    sinks_ptr,
    pieces,
    points,
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HALF: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    TURN_PIECES: tl.constexpr,
):
    """The heads of a KV head from the pieces of all shares, TURN_PIECES at a time."""
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    row = tl.arange(0, GROUP_PAD)[None, :, None]
    is_row = row < GROUP
    head = kv_head * GROUP + row
    dim = tl.arange(0, HALF)[None, None, :]
    largest = tl.full((GROUP_PAD, 1), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD, 1), tl.float32)
    sum1 = tl.zeros((GROUP_PAD, HALF), tl.float32)
    sum2 = tl.zeros((GROUP_PAD, HALF), tl.float32)
    for first in range(0, num_shares, TURN_PIECES):
        share = first + tl.arange(0, TURN_PIECES)[:, None, None]
        is_piece = (share < num_shares) & is_row
        piece = (token * NUM_SHARES + share) * NUM_HEADS + head
        at = pieces[0] + piece * (2 * HALF) + dim
        part1 = tl.load(at, is_piece, other=0.0, cache_modifier=".cg")
        part2 = tl.load(at + HALF, is_piece, other=0.0, cache_modifier=".cg")
        part_largest = tl.load(pieces[1] + piece * 2, is_piece, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(pieces[1] + piece * 2 + 1, is_piece, other=0.0, cache_modifier=".cg")
        new_largest = tl.maximum(largest, tl.max(part_largest, axis=0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # of rows that only pad the group
        decay = tl.exp2(largest - base)
        weight = tl.exp2(part_largest - base[None, :, :])
        largest = new_largest
        total = total * decay + tl.sum(part_total * weight, axis=0)
        sum1 = sum1 * decay + tl.sum(part1 * weight, axis=0)
        sum2 = sum2 * decay + tl.sum(part2 * weight, axis=0)
    sink = tl.full((GROUP_PAD, 1), float("-inf"), tl.float32)
    if HAS_SINKS:
        of_row = tl.arange(0, GROUP_PAD)[:, None]
        sink = tl.load(sinks_ptr + kv_head * GROUP + of_row, of_row < GROUP, other=float("-inf"))
        sink = sink.to(tl.float32) * 1.4426950408889634  # log2(e), as the scores
    _finish(sum1, sum2, largest, total, sink, kv_head, token, points, NUM_KV_HEADS, GROUP, HALF, NUM_PARTS)


@triton.jit
def _finish(
    sum1,
    sum2,
    largest,
    total,
    sink,
    kv_head,
    token,
    points,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Divide sums (rows, HALF) by their totals, the sink's included; store them as fixed-point numbers."""
    ROWS: tl.constexpr = sum1.shape[0]
    SIDE_LANES: tl.constexpr = HALF // 32  # lanes of one half of a head
    NUM_LANES: tl.constexpr = NUM_KV_HEADS * GROUP * 2 * SIDE_LANES
    whole = tl.maximum(largest, sink)
    base = tl.where(whole == float("-inf"), 0.0, whole)
    decay = tl.exp2(largest - base)
    total = total * decay + tl.exp2(sink - base)
    factor = decay / tl.where(total == 0.0, 1.0, total)
    index = tl.arange(0, ROWS * SIDE_LANES)[:, None, None]
    row = index // SIDE_LANES
    half = tl.arange(0, 2)[None, :, None]
    element = half * 16 + tl.arange(0, 16)[None, None, :]
    at = token.to(tl.int64)
    for side in tl.static_range(2):
        lane = ((kv_head * GROUP + row) * 2 + side) * SIDE_LANES + index % SIDE_LANES
        lane = tl.where(row < GROUP, lane, NUM_LANES)
        sums = sum1 if side == 0 else sum2
        tile = tl.reshape(sums * factor, (ROWS * SIDE_LANES, 2, 16))
        column = lane * 32 + element
        store_points(tile, points[0], points[1], points[2], at, lane, half, column, NUM_LANES, NUM_PARTS)
