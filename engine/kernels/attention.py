"""Triton kernels of `paged_attention`; `reference.paged_attention` specifies it.

Two kernels share a batch. Sequences with one query (decodes) take `_attend_split`, which cuts the keys
into splits of a fixed length, and `_combine_splits` (flash decoding: Dao et al. 2023); all others
take `_attend_tile` (flash attention: Dao, arXiv:2307.08691). The heads that share a KV head are
rows of one tile, so each key is loaded and rotated once for all of them. Tile and split lengths
depend on the model's shapes and dtype only: a sequence's result never depends on its neighbours.

Nothing is read back to the host: grids follow from shapes, so decode can be captured in a graph.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import check_pools, padded

_SPLIT_KEYS = 512
_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply
_LOG2_E = math.log2(math.e)


def paged_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    cos_sin: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """softmax(scale * q·k) v per sequence, causal, key j rotated at position j when it is loaded.

    A sink is where the running softmax of its head starts. With a window, tiles and splits of keys
    that no query of theirs sees are not visited.

    Shapes and dtypes as in `reference.paged_attention`.
    """
    check_pools(k_pool, v_pool)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    batch = len(seq_lens)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    group = num_heads // num_kv_heads
    sequence = (block_tables, seq_lens, query_start)
    strides = (block_tables.stride(0), q.stride(0), q.stride(1))
    constants = {
        "SCALE": scale * _LOG2_E,  # exp2 is cheaper than exp
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HALF": head_dim // 2,
        "HALF_PAD": padded(head_dim // 2, _MIN_DOT),
        "BLOCK_SIZE": block_size,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "WINDOW": window or 0,
    }
    sinks_or_any = q if sinks is None else sinks  # never read without sinks
    is_wide = q.dtype == torch.float32  # takes twice the registers and shared memory
    if num_tokens > batch:
        tile_rows = padded(group, 64 if is_wide else 128)
        tile_queries = tile_rows // group
        grid = (num_tokens // tile_queries + batch, num_kv_heads)
        _attend_tile[grid](
            q,
            k_pool,
            v_pool,
            *sequence,
            cos_sin,
            sinks_or_any,
            out,
            batch,
            *strides,
            **constants,
            HAS_SINKS=sinks is not None,
            TILE_ROWS=tile_rows,
            TILE_QUERIES=tile_queries,
            TILE_KEYS=32 if is_wide or head_dim > 128 else 64,
            num_warps=8,
            num_stages=1 if is_wide else 2,
        )
    if num_tokens == batch or batch > 1:
        num_splits = -(-block_tables.shape[1] * block_size // _SPLIT_KEYS)
        partial = torch.empty((batch, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        log_sums = torch.empty((batch, num_heads, num_splits), dtype=torch.float32, device=q.device)
        _attend_split[(batch, num_kv_heads, num_splits)](
            q,
            k_pool,
            v_pool,
            *sequence,
            cos_sin,
            partial,
            log_sums,
            *strides,
            **constants,
            TILE_ROWS=padded(group, _MIN_DOT),
            TILE_KEYS=32,
            SPLIT_KEYS=_SPLIT_KEYS,
            num_warps=8 if is_wide else 4,
            num_stages=1 if is_wide else 3,
        )
        _combine_splits[(batch, num_heads)](
            partial,
            log_sums,
            seq_lens,
            query_start,
            sinks_or_any,
            out,
            num_splits,
            HEAD_DIM=head_dim,
            DIM_PAD=padded(head_dim),
            SPLIT_KEYS=_SPLIT_KEYS,
            HAS_SINKS=sinks is not None,
            WINDOW=window or 0,
        )
    return out


@triton.jit
def _attend_keys(
    q1,
    q2,
    largest,
    total,
    first_key,
    end_key,
    last_visible,
    kv_head,
    k_pool_ptr,
    v_pool_ptr,
    block_table_ptr,
    cos_sin_ptr,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Online softmax of one tile of rows over keys first_key .. end_key - 1 of a sequence.

    q1, q2: (TILE_ROWS, HALF_PAD), the two halves of rotated queries; row r sees keys up to
    last_visible[r] (TILE_ROWS, 1), the last WINDOW of them unless it is 0. Values are kept as two
    halves too, so no half is ever padded into the other. `largest` and `total` are what the softmax
    starts from. Returns the un-normalised sums (TILE_ROWS, HALF_PAD) of both halves, the largest
    score and the sum of exponentials (TILE_ROWS, 1), scores in units of log 2.
    """
    dim = tl.arange(0, HALF_PAD)[None, :]
    sum1 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    sum2 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    for start in range(first_key, end_key, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        is_key = key < end_key
        block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        is_inside = is_key[:, None] & (dim < HALF)
        offset = (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + dim
        raw1 = tl.load(k_pool_ptr + offset, mask=is_inside, other=0.0)
        raw2 = tl.load(k_pool_ptr + offset + HALF, mask=is_inside, other=0.0)
        v1 = tl.load(v_pool_ptr + offset, mask=is_inside, other=0.0)
        v2 = tl.load(v_pool_ptr + offset + HALF, mask=is_inside, other=0.0)

        angle = key[:, None] * (2 * HALF) + dim
        cos = tl.load(cos_sin_ptr + angle, mask=is_inside, other=0.0)
        sin = tl.load(cos_sin_ptr + angle + HALF, mask=is_inside, other=0.0)
        wide1, wide2 = raw1.to(tl.float32), raw2.to(tl.float32)
        k1 = (wide1 * cos - wide2 * sin).to(raw1.dtype)
        k2 = (wide2 * cos + wide1 * sin).to(raw1.dtype)

        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION) * SCALE
        is_visible = is_key[None, :] & (key[None, :] <= last_visible)
        if WINDOW:
            is_visible = is_visible & (key[None, :] > last_visible - WINDOW)
        scores = tl.where(is_visible, scores, float("-inf"))  # (TILE_ROWS, TILE_KEYS)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True))
        base = new_largest
        if WINDOW:  # a row's first tiles may lie before its window: -inf less -inf is no number
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - base)
        weights = tl.exp2(scores - base)
        largest = new_largest
        total = total * decay + tl.sum(weights, axis=1, keep_dims=True)
        rounded = weights.to(v1.dtype)
        sum1 = tl.dot(rounded, v1, sum1 * decay, input_precision=PRECISION)
        sum2 = tl.dot(rounded, v2, sum2 * decay, input_precision=PRECISION)
    return sum1, sum2, largest, total


@triton.jit
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
    batch,
    table_stride,
    q_token_stride,
    q_head_stride,
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
    TILE_QUERIES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """TILE_QUERIES queries of one sequence, times the GROUP heads of one KV head."""
    # Sequence s owns the tiles from query_start[s] // TILE_QUERIES + s on: at least as many as it
    # needs. The tile's sequence is the last whose first tile is not behind it.
    tile = tl.program_id(0)
    low, high = 0, batch
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TILE_QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    seq_len = tl.load(seq_lens_ptr + sequence)
    first_query = (tile - start // TILE_QUERIES - sequence) * TILE_QUERIES
    if (num_queries > 1) & (first_query < num_queries):
        row = tl.arange(0, TILE_ROWS)[:, None]
        dim = tl.arange(0, HALF_PAD)[None, :]
        kv_head = tl.program_id(1)
        query = first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = (row < TILE_QUERIES * GROUP) & (query < num_queries)
        is_inside = is_row & (dim < HALF)
        token = (start + query).to(tl.int64)
        q_row = q_ptr + token * q_token_stride + head * q_head_stride + dim
        q1 = tl.load(q_row, mask=is_inside, other=0.0)
        q2 = tl.load(q_row + HALF, mask=is_inside, other=0.0)
        num_before = seq_len - num_queries
        first_key = 0
        if WINDOW:
            first_key = tl.maximum(num_before + first_query + 1 - WINDOW, 0) // TILE_KEYS * TILE_KEYS
        largest = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)
        total = tl.zeros((TILE_ROWS, 1), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
            largest = sink.to(tl.float32) * 1.4426950408889634  # log2(e), as the scores
            total += 1.0
        sum1, sum2, _, total = _attend_keys(
            q1,
            q2,
            largest,
            total,
            first_key,
            tl.minimum(num_before + first_query + TILE_QUERIES, seq_len),
            num_before + query,
            kv_head,
            k_pool_ptr,
            v_pool_ptr,
            block_tables_ptr + sequence.to(tl.int64) * table_stride,
            cos_sin_ptr,
            SCALE,
            NUM_KV_HEADS,
            HALF,
            HALF_PAD,
            BLOCK_SIZE,
            PRECISION,
            WINDOW,
            TILE_ROWS,
            TILE_KEYS,
        )
        total = tl.where(total == 0.0, 1.0, total)  # a padding sequence without keys gives zeros
        out_row = out_ptr + (token * (NUM_KV_HEADS * GROUP) + head) * (2 * HALF) + dim
        tl.store(out_row, (sum1 / total).to(q1.dtype), mask=is_inside)
        tl.store(out_row + HALF, (sum2 / total).to(q1.dtype), mask=is_inside)


@triton.jit
def _attend_split(
    q_ptr,
    k_pool_ptr,
    v_pool_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    query_start_ptr,
    cos_sin_ptr,
    partial_ptr,
    log_sums_ptr,
    table_stride,
    q_token_stride,
    q_head_stride,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """One split of the keys of a sequence with one query, for the GROUP heads of one KV head.

    Writes the split's output (batch, heads, splits, head_dim) and the base-2 logarithm of its sum of
    exponentials (batch, heads, splits), float32. Sinks are added when the splits are combined; a
    split that ends before the window begins is left unwritten.
    """
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    seq_len = tl.load(seq_lens_ptr + sequence)
    split = tl.program_id(2)
    first_key = split * SPLIT_KEYS
    end_key = tl.minimum(first_key + SPLIT_KEYS, seq_len)
    if WINDOW:
        first_key = tl.maximum(first_key, tl.maximum(seq_len - WINDOW, 0) // TILE_KEYS * TILE_KEYS)
    if (num_queries == 1) & (first_key < end_key):
        row = tl.arange(0, TILE_ROWS)[:, None]
        dim = tl.arange(0, HALF_PAD)[None, :]
        kv_head = tl.program_id(1)
        head = kv_head * GROUP + row
        is_row = row < GROUP
        is_inside = is_row & (dim < HALF)
        q_row = q_ptr + start.to(tl.int64) * q_token_stride + head * q_head_stride + dim
        q1 = tl.load(q_row, mask=is_inside, other=0.0)
        q2 = tl.load(q_row + HALF, mask=is_inside, other=0.0)
        sum1, sum2, largest, total = _attend_keys(
            q1,
            q2,
            tl.full((TILE_ROWS, 1), float("-inf"), tl.float32),
            tl.zeros((TILE_ROWS, 1), tl.float32),
            first_key,
            end_key,
            tl.zeros((TILE_ROWS, 1), tl.int32) + (seq_len - 1),
            kv_head,
            k_pool_ptr,
            v_pool_ptr,
            block_tables_ptr + sequence * table_stride,
            cos_sin_ptr,
            SCALE,
            NUM_KV_HEADS,
            HALF,
            HALF_PAD,
            BLOCK_SIZE,
            PRECISION,
            WINDOW,
            TILE_ROWS,
            TILE_KEYS,
        )
        index = (sequence * (NUM_KV_HEADS * GROUP) + head) * tl.num_programs(2) + split
        tl.store(partial_ptr + index * (2 * HALF) + dim, sum1 / total, mask=is_inside)
        tl.store(partial_ptr + index * (2 * HALF) + HALF + dim, sum2 / total, mask=is_inside)
        tl.store(log_sums_ptr + index, largest + tl.log2(total), mask=is_row)


@triton.jit
def _combine_splits(
    partial_ptr,
    log_sums_ptr,
    seq_lens_ptr,
    query_start_ptr,
    sinks_ptr,
    out_ptr,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Sum of the splits of one head of one sequence, each weighted by its sum of exponentials.

    The splits are added one after the other, so the result does not depend on how many more splits
    the batch's longest sequence has.
    """
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    if num_queries == 1:
        dim = tl.arange(0, DIM_PAD)
        first = (sequence * tl.num_programs(1) + head) * num_splits
        largest = float("-inf")
        total = 0.0
        if HAS_SINKS:
            largest = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
            total = 1.0
        weighted = tl.zeros((DIM_PAD,), tl.float32)
        seq_len = tl.load(seq_lens_ptr + sequence)
        first_split = 0
        if WINDOW:
            first_split = tl.maximum(seq_len - WINDOW, 0) // SPLIT_KEYS
        for split in range(first_split, tl.cdiv(seq_len, SPLIT_KEYS)):
            log_sum = tl.load(log_sums_ptr + first + split)
            part = tl.load(partial_ptr + (first + split) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
            new_largest = tl.maximum(largest, log_sum)
            decay = tl.exp2(largest - new_largest)
            weight = tl.exp2(log_sum - new_largest)
            largest = new_largest
            total = total * decay + weight
            weighted = weighted * decay + part * weight
        total = tl.where(total == 0.0, 1.0, total)  # a padding sequence without keys gives zeros
        out_head = (start.to(tl.int64) * tl.num_programs(1) + head) * HEAD_DIM + dim
        tl.store(out_ptr + out_head, (weighted / total).to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)
