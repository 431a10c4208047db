"""Attention of a few queries to the keys that a mask allows, many query heads to a KV head.

One Triton launch on CUDA, which writes its output as the next product reads it; torch's attention on a CPU,
which also specifies the kernel.
"""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from dayshift.engine.kernels.launch import (
    let_next_begin,
    num_processors,
    overlap_options,
    padded,
    wait_for_previous,
)
from dayshift.policy.smolvla.config import LayerShape

_MASK_ALIGNMENT = 8  # elements that rows of a mask begin at a multiple of: 16 bytes
# (query rows, keys, stages) of a program, as measured on an H200.
_TILES = ((64, 64, 2), (32, 128, 2), (16, 256, 1))
_MAX_TILE_BYTES = 32_768  # of a tile's keys


def mask_buffer(batch: int, shape: LayerShape, queries: int, keys: int, like: Tensor) -> Tensor:
    """An additive mask to be filled by `fill_mask`, for layers of a shape: (batch, 1, group * queries, keys),
    where `group` query heads share a KV head."""
    group = shape.num_heads // shape.num_kv_heads
    stride = -(-keys // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    return like.new_empty((batch, 1, group * queries, stride))[..., :keys]


def fill_mask(mask: Tensor, allowed: Tensor) -> None:
    """Bool (batch, queries, keys) -> 0 where attention is allowed, the lowest finite number elsewhere.

    Finite, so that a row with nothing allowed gives numbers and never NaN.
    """
    lowest = torch.finfo(mask.dtype).min
    of_group = torch.zeros(allowed.shape, dtype=mask.dtype, device=mask.device).masked_fill_(~allowed, lowest)
    mask.unflatten(2, (-1, allowed.shape[1])).copy_(of_group[:, None, None])


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·k / sqrt(head_dim) + mask) v, heads joined.

    q (batch, heads, queries, head_dim) contiguous; k, v (batch, kv_heads, keys, head_dim) with a contiguous
    last dimension; `mask` as `fill_mask` leaves it. Returns (batch, queries, heads * head_dim).
    """
    return attend_triton(q, k, v, mask) if q.is_cuda else attend_torch(q, k, v, mask)


def attend_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`attend`."""
    group = q.shape[1] // k.shape[1]
    # The queries that share a KV head are one longer list of queries: no kernel repeats keys for them.
    queries = q.unflatten(1, (-1, group)).flatten(2, 3)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask)
    return out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2)


def attend_triton(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """`attend`. A program has a tile of the queries of a KV head."""
    batch, num_heads, num_queries, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    group = num_heads // num_kv_heads
    num_rows = group * num_queries
    out = torch.empty((batch, num_queries, num_heads * head_dim), dtype=q.dtype, device=q.device)
    rows, keys, stages = _tile(batch * num_kv_heads, num_rows, num_processors(q.device))
    dim_pad = padded(head_dim, 16)
    _attend_group[(triton.cdiv(num_rows, rows), num_kv_heads, batch)](
        q,
        k,
        v,
        mask,
        out,
        num_queries,
        num_keys,
        *k.stride()[:3],
        *v.stride()[:3],
        mask.stride(0),
        mask.stride(2),
        math.log2(math.e) / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        ROWS=rows,
        KEYS=min(keys, _MAX_TILE_BYTES // (dim_pad * q.element_size())),
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **overlap_options(q.device),
        num_warps=4,
        num_stages=stages,
    )
    return out


def _tile(num_kv_lists: int, num_rows: int, num_processors: int) -> tuple[int, int, int]:
    """The largest one that leaves no processor without a program, else the smallest."""
    fitting = (tile for tile in _TILES if num_kv_lists * triton.cdiv(num_rows, tile[0]) >= num_processors)
    return next(fitting, _TILES[-1])


@triton.jit
def _attend_group(
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    out_ptr,
    num_queries,
    num_keys,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    v_batch_stride,
    v_head_stride,
    v_token_stride,
    mask_batch_stride,
    mask_row_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Softmax in base 2, over tiles of keys (Milakov & Gimelshein, arXiv:1805.02867)."""
    let_next_begin(OVERLAPS)
    wait_for_previous(OVERLAPS)
    kv_head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head, query = row // num_queries, row % num_queries
    dim, tile_key = tl.arange(0, DIM_PAD), tl.arange(0, KEYS)
    is_row, is_dim = row < GROUP * num_queries, dim < HEAD_DIM
    is_value = is_row[:, None] & is_dim[None, :]
    q_row = (batch * NUM_KV_HEADS + kv_head) * GROUP * num_queries + row
    q = tl.load(q_ptr + q_row[:, None] * HEAD_DIM + dim[None, :], mask=is_value, other=0.0)
    k_ptr += batch * k_batch_stride + kv_head * k_head_stride
    v_ptr += batch * v_batch_stride + kv_head * v_head_stride
    mask_ptr += batch * mask_batch_stride

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, DIM_PAD), tl.float32)
    for first_key in range(0, num_keys, KEYS):
        key = first_key + tile_key
        is_key = key < num_keys
        is_loaded = is_key[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + key[:, None] * k_token_stride + dim[None, :], mask=is_loaded, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_token_stride + dim[None, :], mask=is_loaded, other=0.0)
        masked = tl.load(
            mask_ptr + query[:, None] * mask_row_stride + key[None, :],
            mask=is_row[:, None] & is_key[None, :],
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        # Not -inf: a row that may attend to nothing gives the mean of all values, as torch does.
        scores = tl.where(masked < 0, -1e30, scores)
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_largest[:, None])
        kept = tl.exp2(largest - new_largest)
        total = total * kept + tl.sum(weights, axis=1)
        summed = summed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = new_largest
    out = (summed / total[:, None]).to(q.dtype)
    out_row = (batch * num_queries + query) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :], out, mask=is_value)
