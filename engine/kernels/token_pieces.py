"""What programs that share a sequence's keys leave behind, and how it becomes the output of attention.

A piece is the sums of a share (heads, head_dim), float32, with its largest scores and the totals of its
exponentials, scores in units of log 2. Programs count themselves when their pieces are there. The last of
them wait until all are there, and add up heads of their own, in the order of the pieces.
"""

# Triton writes compile-time constants in capitals.
# ruff: noqa: N803, N806
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from dayshift.engine.kernels.quantized_inputs import store_points


@triton.jit
def share_piece(
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
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    ADDERS: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """Leave the piece of a share, both halves of its sums (heads, HALF). `num_shares` programs leave one of
    this KV head and token; the last of them write the output.

    `pieces`: sums, the largest scores and totals, counters that are zero between launches. ADDERS: programs
    that add up, if there are so many. NUM_PIECES is a power of two that is not below NUM_SHARES.
    """
    head = kv_head * GROUP + tl.arange(0, sum1.shape[0])[:, None]
    is_head = head < (kv_head + 1) * GROUP
    dim = tl.arange(0, HALF)[None, :]
    piece = (token * NUM_SHARES + share) * (NUM_KV_HEADS * GROUP) + head
    to = pieces[0] + piece * (2 * HALF) + dim
    tl.store(to, sum1, is_head, cache_modifier=".cg")
    tl.store(to + HALF, sum2, is_head, cache_modifier=".cg")
    tl.store(pieces[1] + piece * 2, largest, is_head, cache_modifier=".cg")
    tl.store(pieces[1] + piece * 2 + 1, total, is_head, cache_modifier=".cg")
    tl.debug_barrier()  # all of a piece is stored before it is counted
    counter = pieces[2] + token * NUM_KV_HEADS + kv_head
    num_adders = tl.minimum(num_shares, ADDERS)
    adder = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") - (num_shares - num_adders)
    if adder >= 0:
        while tl.atomic_add(counter, 0, sem="acq_rel", scope="gpu") < num_shares:
            pass
        if tl.atomic_add(counter, 1, sem="relaxed", scope="gpu") == num_shares + num_adders - 1:
            tl.store(counter, 0)
        for row in range(adder, GROUP, num_adders):
            _add_pieces(
                num_shares,
                row,
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
                NUM_PIECES,
            )


@triton.jit
def _add_pieces(
    num_shares,
    row,
    kv_head,
    token,
    sinks_ptr,
    pieces,
    out,
    HAS_SINKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    NUM_PIECES: tl.constexpr,
):
    """The head `row` of a KV head, from the pieces of all shares."""
    share = tl.arange(0, NUM_PIECES)[:, None]
    is_piece = share < num_shares
    dim = tl.arange(0, HALF)[None, :]
    piece = (token * NUM_SHARES + share) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + row
    at = pieces[0] + piece * (2 * HALF) + dim
    part1 = tl.load(at, is_piece, other=0.0, cache_modifier=".cg")
    part2 = tl.load(at + HALF, is_piece, other=0.0, cache_modifier=".cg")
    part_largest = tl.load(pieces[1] + piece * 2, is_piece, other=float("-inf"), cache_modifier=".cg")
    part_total = tl.load(pieces[1] + piece * 2 + 1, is_piece, other=0.0, cache_modifier=".cg")
    largest = tl.max(part_largest, axis=0, keep_dims=True)  # every share has seen a key
    weight = tl.exp2(part_largest - largest)
    total = tl.sum(part_total * weight, axis=0, keep_dims=True)
    sum1 = tl.sum(part1 * weight, axis=0, keep_dims=True)
    sum2 = tl.sum(part2 * weight, axis=0, keep_dims=True)
    of_row = tl.zeros((1, 1), tl.int32) + row
    sink = tl.full((1, 1), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = sink_scores(sinks_ptr + kv_head * GROUP + of_row, of_row < GROUP)
    finish(
        sum1, sum2, largest, total, sink, of_row, kv_head, token, out, NUM_KV_HEADS, GROUP, HALF, NUM_PARTS
    )


@triton.jit
def finish(
    sum1,
    sum2,
    largest,
    total,
    sink,
    row,
    kv_head,
    token,
    out,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """Divide sums (rows, HALF) of the group's heads `row` (rows, 1) by their totals, the sink's included;
    store them, as fixed-point numbers or as they are."""
    whole = tl.maximum(largest, sink)
    base = tl.where(whole == float("-inf"), 0.0, whole)
    decay = tl.exp2(largest - base)
    total = total * decay + tl.exp2(sink - base)
    factor = decay / tl.where(total == 0.0, 1.0, total)
    if NUM_PARTS == 0:
        dim = tl.arange(0, HALF)[None, :]
        to = out[0] + ((token.to(tl.int64) * NUM_KV_HEADS + kv_head) * GROUP + row) * (2 * HALF) + dim
        narrow: tl.constexpr = out[0].dtype.element_ty
        tl.store(to, (sum1 * factor).to(narrow), row < GROUP)
        tl.store(to + HALF, (sum2 * factor).to(narrow), row < GROUP)
    else:
        ROWS: tl.constexpr = sum1.shape[0]
        SIDE_LANES: tl.constexpr = HALF // 32  # lanes of one half of a head
        NUM_LANES: tl.constexpr = NUM_KV_HEADS * GROUP * 2 * SIDE_LANES
        half = tl.arange(0, 2)[None, :, None]
        element = half * 16 + tl.arange(0, 16)[None, None, :]
        at = token.to(tl.int64)
        lane_row = tl.reshape(tl.broadcast_to(row, (ROWS, SIDE_LANES)), (ROWS * SIDE_LANES, 1, 1))
        side_lane = tl.arange(0, ROWS * SIDE_LANES)[:, None, None] % SIDE_LANES
        for side in tl.static_range(2):
            lane = ((kv_head * GROUP + lane_row) * 2 + side) * SIDE_LANES + side_lane
            lane = tl.where(lane_row < GROUP, lane, NUM_LANES)
            sums = sum1 if side == 0 else sum2
            tile = tl.reshape(sums * factor, (ROWS * SIDE_LANES, 2, 16))
            column = lane * 32 + element
            store_points(tile, out[0], out[1], out[2], at, lane, half, column, NUM_LANES, NUM_PARTS)


@triton.jit
def sink_scores(ptr, is_row):
    """Sinks in units of log 2, as the scores."""
    return tl.load(ptr, mask=is_row, other=float("-inf")).to(tl.float32) * 1.4426950408889634
