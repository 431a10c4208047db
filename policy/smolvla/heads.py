"""From the rows of a projection to heads: queries and keys rotated, everything where attention reads it.

One Triton launch on CUDA, where denoising would otherwise launch twenty small kernels for it in every layer;
torch ops on a CPU, which also specify the kernel.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayshift.engine.kernels.launch import let_next_begin, overlap_options, padded, wait_for_previous
from dayshift.policy.smolvla.row_norm import RowNorm, row_scale


class Rotary(NamedTuple):
    """Cosines and sines of some positions, each float32 (batch or 1, 1, length, head_dim / 2), contiguous."""

    cos: Tensor
    sin: Tensor


class KVSlots(NamedTuple):
    """Where keys and values go, each (batch, kv_heads, length, head_dim) with a contiguous last dimension."""

    keys: Tensor
    values: Tensor


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate (batch, heads, length, head_dim); the two halves of a head are its pairs.

    y = [x1 cos - x2 sin, x2 cos + x1 sin] in float32 (Su et al., arXiv:2104.09864).
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotary
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(batch, length, heads * head_dim) -> (batch, heads, length, head_dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(batch, heads, length, head_dim) -> (batch, length, heads * head_dim)."""
    return x.transpose(1, 2).flatten(2)


def place_heads(
    rows: Tensor,
    rotary: Rotary,
    num_heads: int,
    slots: KVSlots | None = None,
    norm: RowNorm | None = None,
) -> Tensor:
    """Rotated queries (batch, num_heads, length, head_dim), contiguous.

    Args:
        rows: (batch, length, size), contiguous: the queries of all heads and, with `slots`, the keys and the
            values behind them.
        rotary: the positions of the rows.
        num_heads: query heads.
        slots: where the rotated keys and the values are written.
        norm: that of what the projection has read, if it is still due.
    """
    place = place_heads_triton if rows.is_cuda else place_heads_torch
    return place(rows, rotary, num_heads, slots, norm)


def place_heads_torch(
    rows: Tensor, rotary: Rotary, num_heads: int, slots: KVSlots | None, norm: RowNorm | None
) -> Tensor:
    """`place_heads`."""
    if norm is not None:
        rows = (rows.float() * norm.scales()).to(rows.dtype)
    num_kv_heads = 0 if slots is None else slots.keys.shape[1]
    head_dim = rows.shape[-1] // (num_heads + 2 * num_kv_heads)
    heads = split_heads(rows, head_dim)
    if slots is None:
        return rotate(heads, rotary)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    slots.keys.copy_(rotate(k, rotary))
    slots.values.copy_(v)
    return rotate(q, rotary)


def place_heads_triton(
    rows: Tensor, rotary: Rotary, num_heads: int, slots: KVSlots | None, norm: RowNorm | None
) -> Tensor:
    """`place_heads`. A program has one token."""
    batch, length, size = rows.shape
    num_kv_heads = 0 if slots is None else slots.keys.shape[1]
    head_dim = size // (num_heads + 2 * num_kv_heads)
    q = torch.empty((batch, num_heads, length, head_dim), dtype=rows.dtype, device=rows.device)
    k, v = (q, q) if slots is None else slots
    norm_size = 0 if norm is None else norm.x.shape[-1]
    _place_heads[(batch * length,)](
        rows,
        q,
        k,
        v,
        rotary.cos,
        rotary.sin,
        rows if norm is None else norm.x,
        0.0 if norm is None else norm.eps,
        length,
        size,
        rotary.cos.stride(0) if len(rotary.cos) > 1 else 0,
        *k.stride()[:3],
        *v.stride()[:3],
        NUM_HEADS=num_heads,
        HEADS_PAD=padded(num_heads),
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS_PAD=padded(max(1, num_kv_heads)),
        HALF=head_dim // 2,
        HALF_PAD=padded(head_dim // 2),
        NORM_SIZE=norm_size,
        NORM_PAD=padded(max(1, norm_size)),
        **overlap_options(rows.device),
        num_warps=2,
    )
    return q


@triton.jit
def _place_heads(
    rows_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    x_ptr,
    eps,
    length,
    row_stride,
    rotary_batch_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    v_batch_stride,
    v_head_stride,
    v_token_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    NORM_SIZE: tl.constexpr,  # 0: the rows are normed
    NORM_PAD: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    batch = (tl.program_id(0) // length).to(tl.int64)
    token = tl.program_id(0) % length
    dim = tl.arange(0, HALF_PAD)[None, :]
    place = batch * rotary_batch_stride + token * HALF + dim
    cos = tl.load(cos_ptr + place, mask=dim < HALF, other=0.0)
    sin = tl.load(sin_ptr + place, mask=dim < HALF, other=0.0)
    row_ptr = rows_ptr + (batch * length + token) * row_stride
    if NORM_SIZE > 0:
        scale = row_scale(x_ptr + (batch * length + token) * NORM_SIZE, eps, NORM_SIZE, NORM_PAD)
        cos, sin = cos * scale, sin * scale  # and so what they rotate

    head = tl.arange(0, HEADS_PAD)[:, None]
    is_query = (head < NUM_HEADS) & (dim < HALF)
    q_out = q_ptr + ((batch * NUM_HEADS + head) * length + token) * (2 * HALF) + dim
    _rotate_into(row_ptr + head * (2 * HALF) + dim, q_out, cos, sin, is_query, HALF)

    if NUM_KV_HEADS > 0:
        kv_head = tl.arange(0, KV_HEADS_PAD)[:, None]
        is_key = (kv_head < NUM_KV_HEADS) & (dim < HALF)
        key_ptr = row_ptr + (NUM_HEADS + kv_head) * (2 * HALF) + dim
        k_out = k_ptr + batch * k_batch_stride + kv_head * k_head_stride + token * k_token_stride + dim
        _rotate_into(key_ptr, k_out, cos, sin, is_key, HALF)
        value_ptr = key_ptr + NUM_KV_HEADS * (2 * HALF)
        v_out = v_ptr + batch * v_batch_stride + kv_head * v_head_stride + token * v_token_stride + dim
        first, second = tl.load(value_ptr, mask=is_key), tl.load(value_ptr + HALF, mask=is_key)
        if NORM_SIZE > 0:
            first = (first.to(tl.float32) * scale).to(first.dtype)
            second = (second.to(tl.float32) * scale).to(second.dtype)
        tl.store(v_out, first, mask=is_key)
        tl.store(v_out + HALF, second, mask=is_key)


@triton.jit
def _rotate_into(x_ptr, y_ptr, cos, sin, is_inside, HALF: tl.constexpr):
    """Rotate the heads at `x_ptr` (their first halves) into `y_ptr`."""
    narrow = tl.load(x_ptr, mask=is_inside, other=0.0)
    first = narrow.to(tl.float32)
    second = tl.load(x_ptr + HALF, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(y_ptr, (first * cos - second * sin).to(narrow.dtype), mask=is_inside)
    tl.store(y_ptr + HALF, (second * cos + first * sin).to(narrow.dtype), mask=is_inside)
