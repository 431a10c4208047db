"""Which pairs of a token and one of its picks an expert gets, cut into tiles.

Few pairs are listed in one launch, by a program for each expert that reads all of them. Many are counted
chunk by chunk first: then every program knows where its experts' pairs of its chunk stand. Nothing depends
on the order in which programs run.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous

_FEW_PAIRS = 32_768  # up to it every program reading all of them takes less time than counting first
_MOST_PAIRS = 4096  # that such a program reads at once
_CHUNK = 4096  # pairs
_TURN = 512  # pairs of a chunk, compared with some experts at once
_EXPERTS = 8  # of a program
_CHUNKS = 32  # whose counts are read at once


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs (a token and one of its picks; number token * num_picked + pick) in the order of their
    experts, cut into tiles of one expert each. Both tensors int32, on the device."""

    order: torch.Tensor  # (num_pairs,) pairs, those of an expert in their own order
    tiles: torch.Tensor  # (num_tiles, 3) expert, first place in `order`, number of pairs: 0 in spare tiles


def tile_experts(expert_ids: torch.Tensor, num_experts: int, tile_tokens: int) -> ExpertTiles:
    """The tiles of at most `tile_tokens` pairs of int64 `expert_ids` (num_tokens, num_picked)."""
    num_pairs, device = expert_ids.numel(), expert_ids.device
    listed = ExpertTiles(
        order=torch.empty(num_pairs, dtype=torch.int32, device=device),
        tiles=torch.empty((num_pairs // tile_tokens + num_experts, 3), dtype=torch.int32, device=device),
    )
    if num_pairs > _FEW_PAIRS:
        _tile_chunks(expert_ids, num_experts, tile_tokens, listed)
        return listed
    block = min(_MOST_PAIRS, padded(num_pairs, 32))
    _tile_expert[(num_experts,)](
        expert_ids,
        listed.order,
        listed.tiles,
        num_pairs,
        TILE_TOKENS=tile_tokens,
        PAIRS=block,
        num_warps=max(1, min(8, block // 128)),
        **overlap_options(device),
    )
    return listed


def _tile_chunks(expert_ids: torch.Tensor, num_experts: int, tile_tokens: int, listed: ExpertTiles) -> None:
    num_pairs, device = expert_ids.numel(), expert_ids.device
    groups, num_chunks = triton.cdiv(num_experts, _EXPERTS), triton.cdiv(num_pairs, _CHUNK)
    counts = torch.empty((num_chunks, groups * _EXPERTS), dtype=torch.int32, device=device)
    common = {"CHUNK": _CHUNK, "TURN": _TURN, "EXPERTS": _EXPERTS, **overlap_options(device)}
    _count_chunk[(groups, num_chunks)](expert_ids, counts, num_pairs, **common)
    _tile_chunk[(groups, num_chunks)](
        expert_ids,
        counts,
        listed.order,
        listed.tiles,
        num_pairs,
        num_experts,
        TILE_TOKENS=tile_tokens,
        COLUMNS=padded(groups * _EXPERTS),
        CHUNKS=_CHUNKS,
        **common,
    )


@triton.jit
def _tile_expert(
    expert_ids_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    TILE_TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The program's expert: its pairs into `order`, its tiles into `tiles`.

    Where its pairs begin tells where its tiles may: the experts before it have no more than
    start // TILE_TOKENS + expert tiles.
    """
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    expert = tl.program_id(0)
    index = tl.arange(0, PAIRS)
    before = tl.zeros((PAIRS,), tl.int32)
    mine = tl.zeros((PAIRS,), tl.int32)
    for first in range(0, num_pairs, PAIRS):
        picked = tl.load(expert_ids_ptr + first + index, mask=first + index < num_pairs, other=1 << 30)
        before += (picked < expert).to(tl.int32)
        mine += (picked == expert).to(tl.int32)
    start, count = tl.sum(before, axis=0), tl.sum(mine, axis=0)
    tile = start // TILE_TOKENS + expert
    num_tiles = (start + count) // TILE_TOKENS + expert + 1 - tile
    for number in range(num_tiles):
        entry = tiles_ptr + 3 * (tile + number)
        tl.store(entry, expert)
        tl.store(entry + 1, start + number * TILE_TOKENS)
        tl.store(entry + 2, tl.maximum(0, tl.minimum(TILE_TOKENS, count - number * TILE_TOKENS)))
    for first in range(0, num_pairs, PAIRS):
        picked = tl.load(expert_ids_ptr + first + index, mask=first + index < num_pairs, other=1 << 30)
        is_mine = (picked == expert).to(tl.int32)
        place = start + tl.cumsum(is_mine, axis=0) - 1
        tl.store(order_ptr + place, first + index, mask=is_mine == 1)
        start += tl.sum(is_mine, axis=0)


@triton.jit
def _count_chunk(
    expert_ids_ptr,
    counts_ptr,
    num_pairs,
    CHUNK: tl.constexpr,
    TURN: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """counts (num_chunks, experts): how many pairs of a chunk some experts have."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    first = tl.program_id(1) * CHUNK
    count = tl.zeros((EXPERTS,), tl.int32)
    for turn in range(0, CHUNK, TURN):
        is_theirs = _are_of(expert_ids_ptr, first + turn + tl.arange(0, TURN), num_pairs, expert)
        count += tl.sum(is_theirs, axis=1)
    tl.store(counts_ptr + tl.program_id(1) * (tl.num_programs(0) * EXPERTS) + expert, count)


@triton.jit
def _tile_chunk(
    expert_ids_ptr,
    counts_ptr,
    order_ptr,
    tiles_ptr,
    num_pairs,
    num_experts,
    TILE_TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TURN: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Some experts: their pairs of a chunk into `order`; the first chunk's programs write their tiles, which
    stand where those of `_tile_expert` do."""
    wait_for_previous(OVERLAPS)
    let_next_begin(OVERLAPS)
    num_columns, num_chunks, chunk = tl.num_programs(0) * EXPERTS, tl.num_programs(1), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.int32)
    in_front = tl.zeros((COLUMNS,), tl.int32)  # in the chunks before this one
    for first_chunk in range(0, num_chunks, CHUNKS):
        row = first_chunk + tl.arange(0, CHUNKS)[:, None]
        counts = tl.load(
            counts_ptr + row * num_columns + column[None, :],
            mask=(row < num_chunks) & (column < num_columns)[None, :],
            other=0,
        )
        total += tl.sum(counts, axis=0)
        in_front += tl.sum(tl.where(row < chunk, counts, 0), axis=0)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    is_expert = column[None, :] == expert[:, None]
    start = tl.sum(tl.where(is_expert, (tl.cumsum(total, axis=0) - total)[None, :], 0), axis=1)
    place = start + tl.sum(tl.where(is_expert, in_front[None, :], 0), axis=1)
    if chunk == 0:
        count = tl.sum(tl.where(is_expert, total[None, :], 0), axis=1)
        tile = start // TILE_TOKENS + expert
        num_tiles = (start + count) // TILE_TOKENS + expert + 1 - tile
        for number in range(tl.max(num_tiles, axis=0)):
            entry, is_tile = tiles_ptr + 3 * (tile + number), (number < num_tiles) & (expert < num_experts)
            num_left = tl.maximum(0, tl.minimum(TILE_TOKENS, count - number * TILE_TOKENS))
            tl.store(entry, expert, mask=is_tile)
            tl.store(entry + 1, start + number * TILE_TOKENS, mask=is_tile)
            tl.store(entry + 2, num_left, mask=is_tile)
    for turn in range(0, CHUNK, TURN):
        pair = chunk * CHUNK + turn + tl.arange(0, TURN)
        is_theirs = _are_of(expert_ids_ptr, pair, num_pairs, expert)
        to = order_ptr + place[:, None] + tl.cumsum(is_theirs, axis=1) - 1
        tl.store(to, tl.broadcast_to(pair[None, :], (EXPERTS, TURN)), mask=is_theirs == 1)
        place += tl.sum(is_theirs, axis=1)


@triton.jit
def _are_of(expert_ids_ptr, pair, num_pairs, expert):
    """(experts, pairs): 1 where a pair is an expert's."""
    picked = tl.load(expert_ids_ptr + pair, mask=pair < num_pairs, other=1 << 30)
    return (picked[None, :] == expert[:, None]).to(tl.int32)
