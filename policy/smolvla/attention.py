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
from dataclasses import dataclass

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

# Query rows of a program, and keys of a turn of its loop, as measured on an H200.
_ROWS = (64, 32, 16)
_FEW_KEYS, _MANY_KEYS = 64, 256
_MAX_TILE_BYTES = 32_768  # of a tile's keys
# The score of a key that is not seen. Not -inf: a query that sees nothing gets numbers, never NaN.
_HIDDEN = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMask:
    """Which keys the queries of a batch see: of those that are there, the first `num_open` all; of the
    others, the last of which are the queries' own tokens, those that are not behind the query."""

    scores: Tensor  # float32 (batch, keys): 0 for a key that is there, else `_HIDDEN`
    num_open: int
    dense: Tensor | None
    """(batch, 1, group * queries, keys), to be added to scores, where `group` query heads share a KV head.
    On a CPU; on CUDA the kernel needs none."""

    @classmethod
    def allocate(
        cls, batch: int, shape: LayerShape, num_queries: int, num_keys: int, num_open: int, like: Tensor
    ) -> KeyMask:
        """For layers of a shape; to be filled by `fill`."""
        rows = num_queries * (shape.num_heads // shape.num_kv_heads)
        return cls(
            scores=torch.zeros((batch, num_keys), device=like.device),
            num_open=num_open,
            dense=None if like.is_cuda else like.new_zeros((batch, 1, rows, num_keys)),
        )

    def fill(self, valid: Tensor, num_queries: int) -> None:
        """Bool (batch, length): which of the first keys are there. The ones behind them all are."""
        self.scores[:, : valid.shape[1]] = torch.where(valid, 0.0, _HIDDEN)
        if self.dense is not None:
            key = torch.arange(self.scores.shape[1], device=valid.device)
            last_seen = key[-num_queries:].clamp(min=self.num_open - 1)
            is_hidden = (self.scores < 0)[:, None] | (key > last_seen[:, None])
            lowest = torch.finfo(self.dense.dtype).min
            of_queries = torch.zeros_like(is_hidden, dtype=self.dense.dtype).masked_fill_(is_hidden, lowest)
            self.dense.unflatten(2, (-1, num_queries)).copy_(of_queries[:, None, None])

    def first(self, batch_size: int) -> KeyMask:
        """The part that belongs to the first robots."""
        dense = None if self.dense is None else self.dense[:batch_size]
        return KeyMask(scores=self.scores[:batch_size], num_open=self.num_open, dense=dense)

    def open_keys(self) -> KeyMask:
        """The open ones alone."""
        dense = None if self.dense is None else self.dense[..., : self.num_open]
        return KeyMask(scores=self.scores[:, : self.num_open], num_open=self.num_open, dense=dense)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask) -> Tensor:
    """softmax(q·k / sqrt(head_dim) + mask) v, heads joined.

    q (batch, heads, queries, head_dim) contiguous; k, v (batch, kv_heads, keys, head_dim) with a contiguous
    last dimension. Returns (batch, queries, heads * head_dim).
    """
    return attend_triton(q, k, v, mask) if q.is_cuda else attend_torch(q, k, v, mask)


def attend_torch(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask) -> Tensor:
    """`attend`."""
    group = q.shape[1] // k.shape[1]
    # The queries that share a KV head are one longer list of queries: no kernel repeats keys for them.
    queries = q.unflatten(1, (-1, group)).flatten(2, 3)
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask.dense)
    return out.unflatten(2, (group, -1)).permute(0, 3, 1, 2, 4).flatten(2)


def attend_triton(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask) -> Tensor:
    """`attend`. A program has a tile of the queries of a KV head."""
    batch, num_heads, num_queries, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    group = num_heads // num_kv_heads
    num_rows = group * num_queries
    out = torch.empty((batch, num_queries, num_heads * head_dim), dtype=q.dtype, device=q.device)
    rows, keys = _tile(batch * num_kv_heads, num_rows, num_keys, num_processors(q.device))
    dim_pad = padded(head_dim, 16)
    _attend_group[(triton.cdiv(num_rows, rows), num_kv_heads, batch)](
        q,
        k,
        v,
        mask.scores,
        out,
        num_queries,
        num_keys,
        mask.num_open,
        *k.stride()[:3],
        *v.stride()[:3],
        mask.scores.stride(0),
        math.log2(math.e) / math.sqrt(head_dim),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        ROWS=rows,
        KEYS=min(keys, _MAX_TILE_BYTES // (dim_pad * q.element_size())),
        HIDDEN=_HIDDEN,
        ALL_OPEN=mask.num_open >= num_keys,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **overlap_options(q.device),
        num_warps=4,
        num_stages=1,  # programs hide each other's loads: more of them fit
    )
    return out


def _tile(num_kv_lists: int, num_rows: int, num_keys: int, num_processors: int) -> tuple[int, int]:
    """The most rows that leave no processor without a program, else the fewest; with many rows few keys, or
    twice as many where that pads no more."""
    programs = {rows: num_kv_lists * triton.cdiv(num_rows, rows) for rows in _ROWS}
    rows = next((rows for rows in _ROWS if programs[rows] >= num_processors), _ROWS[-1])
    if rows < _ROWS[0]:
        return rows, _MANY_KEYS
    return rows, _FEW_KEYS if triton.cdiv(num_keys, _FEW_KEYS) % 2 else 2 * _FEW_KEYS


@triton.jit
def _attend_group(
    q_ptr,
    k_ptr,
    v_ptr,
    hidden_ptr,
    out_ptr,
    num_queries,
    num_keys,
    num_open,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    v_batch_stride,
    v_head_stride,
    v_token_stride,
    hidden_batch_stride,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ALL_OPEN: tl.constexpr,
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
    hidden_ptr += batch * hidden_batch_stride
    last_seen = tl.maximum(query + num_keys - num_queries, num_open - 1)

    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    summed = tl.zeros((ROWS, DIM_PAD), tl.float32)
    for first_key in range(0, num_keys, KEYS):
        key = first_key + tile_key
        is_key = key < num_keys
        is_loaded = is_key[:, None] & is_dim[None, :]
        k = tl.load(k_ptr + key[:, None] * k_token_stride + dim[None, :], mask=is_loaded, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_token_stride + dim[None, :], mask=is_loaded, other=0.0)
        hidden = tl.load(hidden_ptr + key, mask=is_key, other=float("-inf"))
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + hidden[None, :]
        if not ALL_OPEN:
            is_hidden = (key[None, :] > last_seen[:, None]) & is_key[None, :]
            scores = tl.where(is_hidden, HIDDEN, scores)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_largest[:, None])
        kept = tl.exp2(largest - new_largest)
        total = total * kept + tl.sum(weights, axis=1)
        summed = summed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = new_largest
    out = (summed * (1.0 / total)[:, None]).to(q.dtype)
    out_row = (batch * num_queries + query) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dim[None, :], out, mask=is_value)
