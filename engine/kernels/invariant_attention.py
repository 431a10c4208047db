"""Attention whose sums have one order for every query: batch-invariant.

A decode and a chunk of a prompt take the same two kernels: the keys of a sequence are cut into splits at
fixed positions, each split into tiles at fixed positions, and a query's splits are added one after the
other. Keys that a query does not see add an exact zero, so a query's result does not depend on the
queries beside it, on the chunk that it came in, or on how long other sequences are.
`reference.paged_attention` specifies the op.
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

from dayshift.engine.kernels.attention_tiles import sequence_of_tile
from dayshift.engine.kernels.kv_blocks import load_scale, quantized_places, values_of
from dayshift.engine.kernels.launch import check_pools, padded
from dayshift.engine.kernels.quantized_tiles import LEAST_SCALE, QUERY_FACTOR

_SPLIT_KEYS = 512
_TILE_ROWS = 64  # queries times the heads that share a KV head
_MIN_DOT = 16  # the smallest side of a tile that tensor cores multiply
_MAX_PARTIAL_BYTES = 256 << 20  # of the splits' sums; more queries take several launches
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
    """softmax(scale * q·k) v per sequence, causal. Shapes and dtypes as in `reference.paged_attention`."""
    check_pools(k_pool, v_pool)
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_pool.shape
    batch, group = len(seq_lens), num_heads // num_kv_heads
    is_wide = q.dtype == torch.float32 or head_dim > 128  # what more stages take does not fit sm_89
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_splits = triton.cdiv(block_tables.shape[1] * block_size, _SPLIT_KEYS)
    query_bytes = num_heads * num_splits * (head_dim + 1) * 4
    num_queries = min(num_tokens, max(1, _MAX_PARTIAL_BYTES // query_bytes))  # of a launch
    partial = torch.empty(
        (num_queries, num_heads, num_splits, head_dim), dtype=torch.float32, device=q.device
    )
    log_sums = torch.empty((num_queries, num_heads, num_splits), dtype=torch.float32, device=q.device)
    tile_rows = padded(group, _TILE_ROWS)
    tile_queries = tile_rows // group
    sequences = (block_tables, seq_lens, query_start)
    common = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HALF": head_dim // 2,
        "HALF_PAD": padded(head_dim // 2, _MIN_DOT),
        "HAS_SINKS": sinks is not None,
        "WINDOW": window or 0,
        "TILE_ROWS": tile_rows,
        "TILE_QUERIES": tile_queries,
        "SPLIT_KEYS": _SPLIT_KEYS,
        "num_warps": 4,
    }
    for first in range(0, num_tokens, num_queries):
        end = min(first + num_queries, num_tokens)
        # Sequence s owns the tiles from query_start[s] // tile_queries + s on, at least as many as it
        # needs: those of queries first .. end - 1 lie here.
        first_tile = max(0, first // tile_queries - 1)
        num_tiles = end // tile_queries + batch - first_tile
        _attend_split[(num_tiles, num_kv_heads, num_splits)](
            q,
            k_pool,
            v_pool,
            *sequences,
            cos_sin,
            partial,
            log_sums,
            batch,
            first,
            end,
            first_tile,
            block_tables.stride(0),
            q.stride(0),
            q.stride(1),
            SCALE=scale * _LOG2_E,  # exp2 is cheaper than exp
            BLOCK_SIZE=block_size,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            TILE_KEYS=32,
            num_stages=1 if is_wide else 3,
            **common,
        )
        _add_splits[(num_tiles, num_kv_heads)](
            partial,
            log_sums,
            seq_lens,
            query_start,
            q if sinks is None else sinks,  # not read
            out,
            batch,
            first,
            end,
            first_tile,
            num_splits,
            **common,
        )
    return out


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
    batch,
    first_token,
    end_token,
    first_tile,
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
    SPLIT_KEYS: tl.constexpr,
):
    """One split of the keys of TILE_QUERIES queries of one sequence, times the GROUP heads of a KV head.

    Writes what the split gives (tokens, heads, splits, head_dim) and the base-2 logarithm of its sum of
    exponentials (tokens, heads, splits), float32, for queries that see a key of it.
    """
    tile = first_tile + tl.program_id(0)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    sequence = sequence_of_tile(tile, query_start_ptr, batch, TILE_QUERIES)
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    num_before = tl.load(seq_lens_ptr + sequence) - num_queries
    first_query = (tile - start // TILE_QUERIES - sequence) * TILE_QUERIES
    first_key = split * SPLIT_KEYS
    end_key = tl.minimum(
        first_key + SPLIT_KEYS, num_before + tl.minimum(first_query + TILE_QUERIES, num_queries)
    )
    if WINDOW:
        first_seen = tl.maximum(num_before + first_query + 1 - WINDOW, 0)
        first_key = tl.maximum(first_key, first_seen // TILE_KEYS * TILE_KEYS)
    if (first_query < num_queries) & (first_key < end_key):
        place = tl.arange(0, TILE_ROWS)[:, None]
        dim = tl.arange(0, HALF_PAD)[None, :]
        query = first_query + place // GROUP
        head = kv_head * GROUP + place % GROUP
        token = start + query
        is_row = (place < TILE_QUERIES * GROUP) & (query < num_queries)
        is_row = is_row & (token >= first_token) & (token < end_token)
        is_inside = is_row & (dim < HALF)
        q_row = q_ptr + token.to(tl.int64) * q_token_stride + head * q_head_stride + dim
        q1 = tl.load(q_row, mask=is_inside, other=0.0)
        q2 = tl.load(q_row + HALF, mask=is_inside, other=0.0)
        last_seen = num_before + query
        is_quantized: tl.constexpr = k_pool_ptr.dtype.element_ty.is_int()
        narrow: tl.constexpr = tl.float16 if is_quantized and q1.dtype != tl.float32 else q1.dtype
        keys_ptr, values_ptr = values_of(k_pool_ptr), values_of(v_pool_ptr)
        if is_quantized:  # as in `quantized_tiles`
            q1 = (q1.to(tl.float32) * QUERY_FACTOR).to(narrow)
            q2 = (q2.to(tl.float32) * QUERY_FACTOR).to(narrow)

        largest = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)
        total = tl.zeros((TILE_ROWS, 1), tl.float32)
        sum1 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
        sum2 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
        for tile_key in range(first_key, end_key, TILE_KEYS):
            key = tile_key + tl.arange(0, TILE_KEYS)
            is_key = key < end_key
            block_ids = block_tables_ptr + sequence.to(tl.int64) * table_stride + key // BLOCK_SIZE
            if is_quantized:
                block = tl.load(block_ids, mask=is_key, other=0)
                first_byte, scale_place = quantized_places(
                    block, key % BLOCK_SIZE, kv_head, NUM_KV_HEADS, HALF, BLOCK_SIZE
                )
                offset = first_byte[:, None] + dim
                k_scale = load_scale(k_pool_ptr, scale_place, is_key) / QUERY_FACTOR
                log_v_scale = tl.log2(tl.maximum(load_scale(v_pool_ptr, scale_place, is_key), LEAST_SCALE))
            else:
                slot = tl.load(block_ids, mask=is_key, other=0).to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
                offset = (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + dim
            is_value = is_key[:, None] & (dim < HALF)
            raw1 = tl.load(keys_ptr + offset, mask=is_value, other=0.0)
            raw2 = tl.load(keys_ptr + offset + HALF, mask=is_value, other=0.0)
            v1 = tl.load(values_ptr + offset, mask=is_value, other=0.0)
            v2 = tl.load(values_ptr + offset + HALF, mask=is_value, other=0.0)
            angle = key[:, None] * (2 * HALF) + dim
            cos = tl.load(cos_sin_ptr + angle, mask=is_value, other=0.0)
            sin = tl.load(cos_sin_ptr + angle + HALF, mask=is_value, other=0.0)
            wide1, wide2 = raw1.to(tl.float32), raw2.to(tl.float32)
            k1 = (wide1 * cos - wide2 * sin).to(narrow)
            k2 = (wide2 * cos + wide1 * sin).to(narrow)

            scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION) * SCALE
            if is_quantized:
                scores = scores * k_scale[None, :] + log_v_scale[None, :]
            is_seen = is_key[None, :] & (key[None, :] <= last_seen)
            if WINDOW:
                is_seen = is_seen & (key[None, :] > last_seen - WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True))
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # no key is seen yet
            decay = tl.exp2(largest - base)
            weights = tl.exp2(scores - base)
            largest = new_largest
            rounded = weights.to(narrow)
            if is_quantized:
                weights = weights * tl.exp2(-log_v_scale)[None, :]
                v1, v2 = v1.to(narrow), v2.to(narrow)
            total = total * decay + tl.sum(weights, axis=1, keep_dims=True)
            sum1 = tl.dot(rounded, v1, sum1 * decay, input_precision=PRECISION)
            sum2 = tl.dot(rounded, v2, sum2 * decay, input_precision=PRECISION)

        is_row = is_row & (total > 0.0)
        total = tl.where(total > 0.0, total, 1.0)
        num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
        index = ((token - first_token).to(tl.int64) * num_heads + head) * tl.num_programs(2) + split
        out = partial_ptr + index * (2 * HALF) + dim
        tl.store(out, sum1 / total, mask=is_row & (dim < HALF))
        tl.store(out + HALF, sum2 / total, mask=is_row & (dim < HALF))
        tl.store(log_sums_ptr + index, largest + tl.log2(total), mask=is_row)


@triton.jit
def _add_splits(
    partial_ptr,
    log_sums_ptr,
    seq_lens_ptr,
    query_start_ptr,
    sinks_ptr,
    out_ptr,
    batch,
    first_token,
    end_token,
    first_tile,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
):
    """out (num_tokens, heads, head_dim): the splits of a tile's queries, weighted by their sums of
    exponentials, one after the other. A split that a query does not see leaves its sums as they are."""
    tile, kv_head = first_tile + tl.program_id(0), tl.program_id(1)
    sequence = sequence_of_tile(tile, query_start_ptr, batch, TILE_QUERIES)
    start = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - start
    num_before = tl.load(seq_lens_ptr + sequence) - num_queries
    first_query = (tile - start // TILE_QUERIES - sequence) * TILE_QUERIES
    if first_query < num_queries:
        place = tl.arange(0, TILE_ROWS)[:, None]
        dim = tl.arange(0, HALF_PAD)[None, :]
        query = first_query + place // GROUP
        head = kv_head * GROUP + place % GROUP
        token = start + query
        is_row = (place < TILE_QUERIES * GROUP) & (query < num_queries)
        is_row = is_row & (token >= first_token) & (token < end_token)
        last_seen = num_before + query
        num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
        index = ((token - first_token).to(tl.int64) * num_heads + head) * num_splits

        largest = tl.full((TILE_ROWS, 1), float("-inf"), tl.float32)
        total = tl.zeros((TILE_ROWS, 1), tl.float32)
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + head, mask=is_row, other=0.0)
            largest = sink.to(tl.float32) * 1.4426950408889634  # log2(e), as the scores
            total += 1.0
        sum1 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
        sum2 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
        first_split = 0
        if WINDOW:
            first_split = tl.maximum(num_before + first_query + 1 - WINDOW, 0) // SPLIT_KEYS
        end_key = num_before + tl.minimum(first_query + TILE_QUERIES, num_queries)
        for split in range(first_split, tl.cdiv(end_key, SPLIT_KEYS)):
            is_seen = is_row & (split * SPLIT_KEYS <= last_seen)
            if WINDOW:
                is_seen = is_seen & (split * SPLIT_KEYS + SPLIT_KEYS > last_seen - WINDOW + 1)
            log_sum = tl.load(log_sums_ptr + index + split, mask=is_seen, other=float("-inf"))
            part = partial_ptr + (index + split) * (2 * HALF) + dim
            part1 = tl.load(part, mask=is_seen & (dim < HALF), other=0.0)
            part2 = tl.load(part + HALF, mask=is_seen & (dim < HALF), other=0.0)
            new_largest = tl.maximum(largest, log_sum)
            base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            decay, weight = tl.exp2(largest - base), tl.exp2(log_sum - base)
            largest = new_largest
            total = total * decay + weight
            sum1 = sum1 * decay + part1 * weight
            sum2 = sum2 * decay + part2 * weight
        total = tl.where(total == 0.0, 1.0, total)  # a padding sequence without keys gives zeros
        out = out_ptr + (token.to(tl.int64) * num_heads + head) * (2 * HALF) + dim
        narrow: tl.constexpr = out_ptr.dtype.element_ty
        tl.store(out, (sum1 / total).to(narrow), mask=is_row & (dim < HALF))
        tl.store(out + HALF, (sum2 / total).to(narrow), mask=is_row & (dim < HALF))
