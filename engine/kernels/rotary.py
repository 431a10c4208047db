"""Triton kernels of `rope`, `store_kv` and both in one launch; `reference` specifies them."""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.kv_blocks import store_quantized
from dayshift.engine.kernels.launch import (
    check_pools,
    let_next_begin,
    overlap_options,
    padded,
    wait_for_previous,
)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """[x1 cos - x2 sin, x2 cos + x1 sin], x1 and x2 the halves of each head.

    Shapes and dtypes as in `reference.rope`. Source: Su et al., arXiv:2104.09864.
    """
    rotated = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        _rotate_token[(len(x),)](x, rotated, positions, cos_sin, x.stride(0), x.stride(1), **_head_sizes(x))
    return rotated


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write raw k and v into their slots of the pools, quantised if these are; slot -1 writes nothing.

    Shapes and dtypes as in `reference.store_kv`.
    """
    check_pools(k_pool, v_pool)
    if len(k):
        _store_token[(len(k),)](
            _rows(k),
            _rows(v),
            k_pool,
            v_pool,
            slot_mapping,
            _rows(k).stride(0),
            _rows(v).stride(0),
            HALF=k.shape[2] // 2,
            HALF_PAD=padded(k.shape[2] // 2),
            **_kv_sizes(k, k_pool),
        )


def rope_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """`rope` of q and `store_kv` of the raw k and v in one launch.

    Shapes and dtypes as in `reference.rope_store_kv`.
    """
    check_pools(k_pool, v_pool)
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q):
        _rotate_store_token[(len(q),)](
            q,
            rotated,
            positions,
            cos_sin,
            q.stride(0),
            q.stride(1),
            _rows(k),
            _rows(v),
            k_pool,
            v_pool,
            slot_mapping,
            _rows(k).stride(0),
            _rows(v).stride(0),
            **_head_sizes(q),
            **_kv_sizes(k, k_pool),
            **overlap_options(q.device),
        )
    return rotated


def norm_rope_store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """`rms_norm` of every head of q and k, then `rope_store_kv`, in one launch.

    Shapes and dtypes as in `reference.norm_rope_store_kv`.
    """
    check_pools(k_pool, v_pool)
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if len(q):
        _norm_rotate_store_token[(len(q),)](
            q,
            rotated,
            q_norm,
            k_norm,
            positions,
            cos_sin,
            k,
            v,
            k_pool,
            v_pool,
            slot_mapping,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            eps,
            **_head_sizes(q),
            **_kv_sizes(k, k_pool),
            **overlap_options(q.device),
        )
    return rotated


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(num_tokens, kv_heads, head_dim) as (num_tokens, kv_heads * head_dim), without a copy."""
    return x.view(len(x), -1)


def _kv_sizes(k: torch.Tensor, k_pool: torch.Tensor) -> dict[str, int]:
    num_heads, size = k.shape[1], k[0].numel()
    return {
        "KV_HEADS": num_heads,
        "KV_HEADS_PAD": padded(num_heads),
        "KV_SIZE": size,
        "KV_PAD": padded(size),
        "BLOCK_SIZE": k_pool.shape[1],
    }


def _head_sizes(x: torch.Tensor) -> dict[str, int]:
    num_heads, half = x.shape[1], x.shape[2] // 2
    return {
        "NUM_HEADS": num_heads,
        "HALF": half,
        "HEADS_PAD": padded(num_heads),
        "HALF_PAD": padded(half),
    }


@triton.jit
def _rotate_token(
    x_ptr,
    y_ptr,
    positions_ptr,
    cos_sin_ptr,
    token_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """Rotate all heads of the program's token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    is_inside = (head < NUM_HEADS) & (dim < HALF)
    x_head = x_ptr + token * token_stride + head * head_stride
    x1 = tl.load(x_head + dim, mask=is_inside, other=0.0)
    x2 = tl.load(x_head + HALF + dim, mask=is_inside, other=0.0)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + dim
    cos = tl.load(angles, mask=dim < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dim < HALF, other=0.0)
    wide1, wide2 = x1.to(tl.float32), x2.to(tl.float32)
    y_head = y_ptr + (token * NUM_HEADS + head) * (2 * HALF)
    tl.store(y_head + dim, (wide1 * cos - wide2 * sin).to(x1.dtype), mask=is_inside)
    tl.store(y_head + HALF + dim, (wide2 * cos + wide1 * sin).to(x1.dtype), mask=is_inside)


@triton.jit
def _store_token(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    k_token_stride,
    v_token_stride,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    KV_SIZE: tl.constexpr,
    KV_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Copy k and v of the program's token into its slot, quantised if the pools are."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if k_pool_ptr.dtype.element_ty.is_int():
        k_row, v_row = k_ptr + token * k_token_stride, v_ptr + token * v_token_stride
        _quantize_row(k_row, k_pool_ptr, slot, HALF, HALF_PAD, KV_HEADS, KV_HEADS_PAD, BLOCK_SIZE)
        _quantize_row(v_row, v_pool_ptr, slot, HALF, HALF_PAD, KV_HEADS, KV_HEADS_PAD, BLOCK_SIZE)
    else:
        element = tl.arange(0, KV_PAD)
        is_inside = (element < KV_SIZE) & (slot >= 0)
        k = tl.load(k_ptr + token * k_token_stride + element, mask=is_inside)
        v = tl.load(v_ptr + token * v_token_stride + element, mask=is_inside)
        tl.store(k_pool_ptr + slot * KV_SIZE + element, k, mask=is_inside)
        tl.store(v_pool_ptr + slot * KV_SIZE + element, v, mask=is_inside)


@triton.jit
def _quantize_row(
    x_ptr,
    pool_ptr,
    slot,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Quantise a token's keys or values, (KV_HEADS, 2 * HALF) in a row, into its slot."""
    head = tl.arange(0, KV_HEADS_PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    is_inside = (head < KV_HEADS) & (dim < HALF)
    x1 = tl.load(x_ptr + head * (2 * HALF) + dim, mask=is_inside, other=0.0)
    x2 = tl.load(x_ptr + head * (2 * HALF) + HALF + dim, mask=is_inside, other=0.0)
    store_quantized(x1, x2, pool_ptr, slot, slot >= 0, KV_HEADS, HALF, BLOCK_SIZE, KV_HEADS_PAD, HALF_PAD)


@triton.jit
def _rotate_store_token(
    q_ptr,
    rotated_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_token_stride,
    q_head_stride,
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    k_token_stride,
    v_token_stride,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    KV_SIZE: tl.constexpr,
    KV_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    _rotate_token(
        q_ptr,
        rotated_ptr,
        positions_ptr,
        cos_sin_ptr,
        q_token_stride,
        q_head_stride,
        NUM_HEADS,
        HALF,
        HEADS_PAD,
        HALF_PAD,
    )
    _store_token(
        k_ptr,
        v_ptr,
        k_pool_ptr,
        v_pool_ptr,
        slots_ptr,
        k_token_stride,
        v_token_stride,
        HALF,
        HALF_PAD,
        KV_HEADS,
        KV_HEADS_PAD,
        KV_SIZE,
        KV_PAD,
        BLOCK_SIZE,
    )


@triton.jit
def _load_normed(
    x_ptr,
    norm_ptr,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    """The two halves (PAD, HALF_PAD) of a token's heads, each head normed and rounded to x's dtype."""
    head = tl.arange(0, PAD)[:, None]
    dim = tl.arange(0, HALF_PAD)[None, :]
    is_inside = (head < HEADS) & (dim < HALF)
    narrow1 = tl.load(x_ptr + head * head_stride + dim, mask=is_inside, other=0.0)
    narrow2 = tl.load(x_ptr + head * head_stride + HALF + dim, mask=is_inside, other=0.0)
    x1, x2 = narrow1.to(tl.float32), narrow2.to(tl.float32)
    mean_square = tl.sum(x1 * x1 + x2 * x2, axis=1, keep_dims=True) / (2 * HALF)
    scale = tl.rsqrt(mean_square + eps)
    weight1 = tl.load(norm_ptr + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    weight2 = tl.load(norm_ptr + HALF + dim, mask=dim < HALF, other=0.0).to(tl.float32)
    return (x1 * scale * weight1).to(narrow1.dtype), (x2 * scale * weight2).to(narrow1.dtype)


@triton.jit
def _norm_rotate_store_token(
    q_ptr,
    rotated_ptr,
    q_norm_ptr,
    k_norm_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    slots_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    KV_SIZE: tl.constexpr,
    KV_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Norm and rotate the queries of the program's token; norm its keys, and store them and its values."""
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    dim = tl.arange(0, HALF_PAD)[None, :]

    q1, q2 = _load_normed(
        q_ptr + token * q_token_stride, q_norm_ptr, q_head_stride, eps, NUM_HEADS, HALF, HEADS_PAD, HALF_PAD
    )
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF) + dim
    cos = tl.load(angles, mask=dim < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=dim < HALF, other=0.0)
    wide1, wide2 = q1.to(tl.float32), q2.to(tl.float32)
    head = tl.arange(0, HEADS_PAD)[:, None]
    is_query = (head < NUM_HEADS) & (dim < HALF)
    out = rotated_ptr + (token * NUM_HEADS + head) * (2 * HALF) + dim
    tl.store(out, (wide1 * cos - wide2 * sin).to(q1.dtype), mask=is_query)
    tl.store(out + HALF, (wide2 * cos + wide1 * sin).to(q1.dtype), mask=is_query)

    k1, k2 = _load_normed(
        k_ptr + token * k_token_stride, k_norm_ptr, k_head_stride, eps, KV_HEADS, HALF, KV_HEADS_PAD, HALF_PAD
    )
    if k_pool_ptr.dtype.element_ty.is_int():
        is_kept = slot >= 0
        store_quantized(k1, k2, k_pool_ptr, slot, is_kept, KV_HEADS, HALF, BLOCK_SIZE, KV_HEADS_PAD, HALF_PAD)
        v_row = v_ptr + token * v_token_stride
        _quantize_row(v_row, v_pool_ptr, slot, HALF, HALF_PAD, KV_HEADS, KV_HEADS_PAD, BLOCK_SIZE)
    else:
        kv_head = tl.arange(0, KV_HEADS_PAD)[:, None]
        is_key = (kv_head < KV_HEADS) & (dim < HALF) & (slot >= 0)
        place = k_pool_ptr + slot * KV_SIZE + kv_head * (2 * HALF) + dim
        tl.store(place, k1, mask=is_key)
        tl.store(place + HALF, k2, mask=is_key)

        element = tl.arange(0, KV_PAD)
        is_value = (element < KV_SIZE) & (slot >= 0)
        v = tl.load(v_ptr + token * v_token_stride + element, mask=is_value)
        tl.store(v_pool_ptr + slot * KV_SIZE + element, v, mask=is_value)
