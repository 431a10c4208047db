"""What the attention kernels share: one tile of query rows over a run of a sequence's keys.

Keys are un-rotated in the pool. Reading a row of cosines and sines for each key would double what a
program reads, and the cache behind all programs delivers little more than the memory does. So a
program keeps the angles of the first TILE_KEYS positions in registers, reads one row for each tile,
the angles of its first key, and adds the two (the addition theorems): 4 multiply-adds for a pair.
"""

# Triton writes compile-time constants in capitals, and compiles what follows an `if` that returns.
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl

from dayshift.engine.kernels.quantized_tiles import attend_quantized_keys


@triton.jit
def sequence_of_tile(tile, query_start_ptr, batch, TILE_QUERIES: tl.constexpr):
    """The sequence of a tile of TILE_QUERIES queries: sequence s owns the tiles from
    query_start[s] // TILE_QUERIES + s on, at least as many as it needs. It is the last whose first tile is
    not behind this one."""
    low, high = 0, batch
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // TILE_QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def angles_of_tile(
    cos_sin_ptr, num_positions, HALF: tl.constexpr, HALF_PAD: tl.constexpr, TILE_KEYS: tl.constexpr
):
    """Cosines and sines of positions 0 .. TILE_KEYS - 1, (TILE_KEYS, HALF_PAD) float32 each.

    Without the factor that scaled tables carry (YaRN), which position 0 shows: a sum of angles gets it
    from the other summand.
    """
    position = tl.arange(0, TILE_KEYS)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    is_inside = (position < num_positions) & (dim < HALF)
    unscale = 1.0 / tl.load(cos_sin_ptr)
    row = cos_sin_ptr + position * (2 * HALF) + dim
    cos = tl.load(row, mask=is_inside, other=0.0) * unscale
    sin = tl.load(row + HALF, mask=is_inside, other=0.0) * unscale
    return cos, sin


@triton.jit
def attend_keys(
    q1,
    q2,
    start,
    first_key,
    end_key,
    last_visible,
    kv_head,
    k_pool_ptr,
    v_pool_ptr,
    block_table_ptr,
    cos_sin_ptr,
    tile_cos,
    tile_sin,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SUM_LANES: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Online softmax of one tile of rows over keys first_key .. end_key - 1 of a sequence. SCALE > 0.

    q1, q2: (TILE_ROWS, HALF_PAD), the two halves of rotated queries; row r sees keys up to
    last_visible[r] (TILE_ROWS, 1), the last WINDOW of them unless it is 0. The last tile must not hold
    keys behind end_key that a row which counts would see. Values are kept as two halves too, so no
    half is ever padded into the other. `start` (TILE_ROWS, 1) is a score that the
    softmax starts from, with no value (a sink), or -inf. `tile_cos`, `tile_sin`: `angles_of_tile`.

    SUM_LANES is 1, or TILE_KEYS to add up exponentials lane by lane and the lanes once at the end:
    where several warps share a row, a sum in every turn would make them wait for each other.

    PACKED: of quantised keys and values only, see `attend_quantized_keys`.

    Returns the un-normalised sums (TILE_ROWS, HALF_PAD) of both halves, the largest score and the sum of
    exponentials (TILE_ROWS, 1), scores in units of log 2.
    """
    if k_pool_ptr.dtype.element_ty.is_int():
        return attend_quantized_keys(
            q1,
            q2,
            start,
            first_key,
            end_key,
            last_visible,
            kv_head,
            k_pool_ptr,
            v_pool_ptr,
            block_table_ptr,
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
            SUM_LANES,
            PACKED,
        )
    else:
        return _attend_float_keys(
            q1,
            q2,
            start,
            first_key,
            end_key,
            last_visible,
            kv_head,
            k_pool_ptr,
            v_pool_ptr,
            block_table_ptr,
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
            SUM_LANES,
        )


@triton.jit
def _attend_float_keys(
    q1,
    q2,
    start,
    first_key,
    end_key,
    last_visible,
    kv_head,
    k_pool_ptr,
    v_pool_ptr,
    block_table_ptr,
    cos_sin_ptr,
    tile_cos,
    tile_sin,
    SCALE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SUM_LANES: tl.constexpr,
):
    dim = tl.arange(0, HALF_PAD)[None, :]
    in_tile = tl.arange(0, TILE_KEYS)
    largest = start
    is_sink = (tl.arange(0, SUM_LANES)[None, :] == 0) & (start > float("-inf"))
    total = tl.where(is_sink, 1.0, 0.0)  # (TILE_ROWS, SUM_LANES)
    sum1 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    sum2 = tl.zeros((TILE_ROWS, HALF_PAD), tl.float32)
    # Block ids are read one turn ahead, so that the keys' addresses are known when their turn comes.
    block = tl.load(
        block_table_ptr + (first_key + in_tile) // BLOCK_SIZE, mask=first_key + in_tile < end_key, other=0
    )
    for tile_key in range(first_key, end_key, TILE_KEYS):
        key = tile_key + in_tile
        is_key = key < end_key
        slot = block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE
        next_key = key + TILE_KEYS
        block = tl.load(block_table_ptr + next_key // BLOCK_SIZE, mask=next_key < end_key, other=0)
        is_inside = is_key[:, None] & (dim < HALF)
        offset = (slot * NUM_KV_HEADS + kv_head)[:, None] * (2 * HALF) + dim
        raw1 = tl.load(k_pool_ptr + offset, mask=is_inside, other=0.0)
        raw2 = tl.load(k_pool_ptr + offset + HALF, mask=is_inside, other=0.0)
        v1 = tl.load(v_pool_ptr + offset, mask=is_inside, other=0.0)
        v2 = tl.load(v_pool_ptr + offset + HALF, mask=is_inside, other=0.0)

        first_angle = cos_sin_ptr + tile_key * (2 * HALF) + dim
        first_cos = tl.load(first_angle, mask=dim < HALF, other=0.0)
        first_sin = tl.load(first_angle + HALF, mask=dim < HALF, other=0.0)
        cos = tile_cos * first_cos - tile_sin * first_sin
        sin = tile_sin * first_cos + tile_cos * first_sin
        wide1, wide2 = raw1.to(tl.float32), raw2.to(tl.float32)
        k1 = (wide1 * cos - wide2 * sin).to(raw1.dtype)
        k2 = (wide2 * cos + wide1 * sin).to(raw1.dtype)

        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        is_visible = key[None, :] <= last_visible
        if WINDOW:
            is_visible = is_visible & (key[None, :] > last_visible - WINDOW)
        scores = tl.where(is_visible, scores, float("-inf"))  # (TILE_ROWS, TILE_KEYS)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1, keep_dims=True) * SCALE)
        # A row may have seen no key yet: -inf less -inf is no number.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        decay = tl.exp2(largest - base)
        weights = tl.exp2(scores * SCALE - base)  # one multiply-add
        largest = new_largest
        if SUM_LANES == 1:
            total = total * decay + tl.sum(weights, axis=1, keep_dims=True)
        else:
            total = total * decay + weights
        rounded = weights.to(v1.dtype)
        sum1 = tl.dot(rounded, v1, sum1 * decay, input_precision=PRECISION)
        sum2 = tl.dot(rounded, v2, sum2 * decay, input_precision=PRECISION)
    return sum1, sum2, largest, tl.sum(total, axis=1, keep_dims=True)


@triton.jit
def store_part(
    sum1,
    sum2,
    largest,
    total,
    index,
    partial_ptr,
    stats_ptr,
    is_row,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Leave a split's result, as `attend_keys` returns it, at `index` (rows, 1)."""
    dim = tl.arange(0, HALF_PAD)[None, :]
    part = partial_ptr + index * (2 * HALF) + dim
    tl.store(part, sum1, mask=is_row & (dim < HALF))
    tl.store(part + HALF, sum2, mask=is_row & (dim < HALF))
    tl.store(stats_ptr + index * 2, largest, mask=is_row)
    tl.store(stats_ptr + index * 2 + 1, total, mask=is_row)


@triton.jit
def store_out(sum1, sum2, total, out_row_ptr, is_row, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Divide and store finished rows, `out_row_ptr` (rows, 1). No key and no sink gives zeros: padding."""
    dim = tl.arange(0, HALF_PAD)[None, :]
    total = tl.where(total == 0.0, 1.0, total)
    dtype = out_row_ptr.dtype.element_ty
    tl.store(out_row_ptr + dim, (sum1 / total).to(dtype), mask=is_row & (dim < HALF))
    tl.store(out_row_ptr + HALF + dim, (sum2 / total).to(dtype), mask=is_row & (dim < HALF))
