"""Torch twins of the kernels: what runs on the CPU, and the oracle of the Triton kernels' tests.

Each function here is the specification of its op: formula, shapes, dtypes. All of them accept
float32, float16 and bfloat16 and compute in float32. `num_slots = num_blocks * block_size`; the slot of a
token is `block_id * block_size + offset`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import overload

import torch
import torch.nn.functional as F

from dayshift.engine.kernels.kv_transfer import scatter_kv
from dayshift.engine.models.config import Activation
from dayshift.engine.quant import kv

# Queries attended at once: the float32 score matrix of a long prompt stays within some ten MiB.
_QUERY_TILE = 256


def embed(weight: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 (num_tokens,) -> their rows of (vocab_size, hidden_size), and zeros like them."""
    hidden = F.embedding(token_ids, weight)
    return hidden, torch.zeros_like(hidden)


@overload
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
@overload
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]: ...
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Root mean square norm over the last dimension, with an optional residual added first.

    y = r / sqrt(mean(r²) + eps) * weight with r = x + residual (Zhang & Sennrich, arXiv:1910.07467).

    Args:
        x: (num_tokens, hidden) or (num_tokens, heads, head_dim), last dimension contiguous.
        weight: (hidden,) or (head_dim,).
        eps: added to the mean square.
        residual: shape and dtype of `x`.

    Returns:
        y, or (y, r) when a residual is given; both contiguous, of x's shape and dtype. r is rounded to
        x's dtype before it is normed, as when the two are computed one after the other.
    """
    hidden = x if residual is None else x + residual
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = (normed * weight.float()).to(x.dtype)
    return y if residual is None else (y, hidden)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding, "rotate half" convention (Su et al., arXiv:2104.09864).

    With x1, x2 the two halves of the head dimension and cos, sin the angles of the token's position:
    y = [x1 cos - x2 sin, x2 cos + x1 sin].

    Args:
        x: (num_tokens, heads, head_dim), head_dim even and contiguous.
        positions: (num_tokens,) integers below max_position.
        cos_sin: (max_position, head_dim) float32, cosines in the first half, sines in the second.

    Returns:
        A new contiguous tensor of x's shape and dtype.
    """
    return _rotate(x, cos_sin[positions])


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write keys and values, un-rotated, into their slots of the paged pools, in place.

    Args:
        k, v: (num_tokens, kv_heads, head_dim), the pools' dtype.
        k_pool, v_pool: (num_blocks, block_size, kv_heads, head_dim) contiguous; or quantised, as `quant.kv`
            says, and k and v are quantised as they are written.
        slot_mapping: (num_tokens,) int64, distinct slots; -1 writes nothing.
    """
    is_kept = slot_mapping >= 0
    scatter_kv(k[is_kept], v[is_kept], k_pool, v_pool, slot_mapping[is_kept])


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
    """`rope` of q and `store_kv` of the raw k and v in one launch; arguments as there.

    Returns:
        The rotated q, a new contiguous tensor (num_tokens, heads, head_dim).
    """
    store_kv(k, v, k_pool, v_pool, slot_mapping)
    return rope(q, positions, cos_sin)


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
    """`rms_norm` of every head of q and k (Qwen3), then `rope_store_kv`; arguments as there.

    Args:
        q_norm, k_norm: (head_dim,).

    Returns:
        The normed and rotated q, a new contiguous tensor (num_tokens, heads, head_dim).
    """
    q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return rope_store_kv(q, k, v, positions, cos_sin, k_pool, v_pool, slot_mapping)


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
    """Causal grouped-query attention of a mixed batch over a paged pool of un-rotated keys.

    A sequence of `seq_len` tokens whose last `n` are its queries: query i attends keys
    0 .. seq_len - n + i. Key j is rotated at position j, its index in the sequence, when it is
    loaded, and rounded to the pool's dtype; softmax(scale * q·k) v in float32. Prefill chunks and
    decodes (n = 1) may be mixed in any order. A sequence's result does not depend on its neighbours.

    Args:
        q: (num_tokens, heads, head_dim), rotated already; the queries of all sequences in a row.
        k_pool, v_pool: (num_blocks, block_size, kv_heads, head_dim); heads a multiple of kv_heads. Or
            quantised, as `quant.kv` says: then what is rounded before a product is not part of the
            specification.
        block_tables: (batch, max_blocks) int32, the block ids of each sequence in order.
        seq_lens: (batch,) int32, tokens of each sequence, its queries included; 0 pads the batch.
        query_start: (batch + 1,) int32, where each sequence's queries start in q, and num_tokens.
        cos_sin: (max_position, head_dim) float32 as in `rope`, max_position >= the longest sequence. Angles
            are proportional to the position; all rows may carry one factor.
        scale: factor of the scores, usually head_dim ** -0.5.
        sinks: (heads,) a score for each head that takes its share of the softmax and has no value
            (gpt-oss; "attention sinks", Xiao et al., arXiv:2309.17453).
        window: query i attends only the last `window` keys up to its own; None: all of them.

    Returns:
        (num_tokens, heads, head_dim), q's dtype, zero where seq_len is 0.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    block_size = k_pool.shape[1]
    bounds = pairwise(query_start.tolist())
    for block_table, seq_len, (start, end) in zip(block_tables, seq_lens.tolist(), bounds, strict=True):
        if start == end or seq_len == 0:
            continue
        # Blocks that no query's window reaches are not read.
        num_hidden = 0 if window is None else max(0, seq_len - (end - start) + 1 - window)
        first = num_hidden // block_size * block_size
        block_ids = block_table[first // block_size : -(-seq_len // block_size)]
        raw_keys = _tokens_of(k_pool, block_ids)[: seq_len - first]
        keys = _rotate(raw_keys, cos_sin[first:seq_len]).float()  # (num_keys, kv_heads, head_dim)
        values = _tokens_of(v_pool, block_ids)[: seq_len - first].float()
        out[start:end] = _causal_attention(q[start:end].float(), keys, values, scale, sinks, window)
    return out


def _tokens_of(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """The keys or values of some blocks, (num_blocks * block_size, kv_heads, head_dim)."""
    blocks = pool.index_select(0, block_ids)
    return kv.read_blocks(blocks) if kv.is_quantized(pool) else blocks.flatten(0, 1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Gated activation silu(gate) * up (Shazeer, arXiv:2002.05202).

    Args:
        gate_up: (num_tokens, 2 * intermediate), the gate in the first half.

    Returns:
        (num_tokens, intermediate), contiguous, gate_up's dtype.
    """
    return gated_activation(gate_up, "silu")


def gated_activation(gate_up: torch.Tensor, kind: Activation) -> torch.Tensor:
    """What a gated MLP does between its two products.

    silu: silu(gate) * up (Shazeer, arXiv:2002.05202)
    gelu_tanh: gelu(gate) * up, gelu approximated by tanh (Gemma)
    clamped_swiglu: g * sigmoid(1.702 g) * (u + 1), g = min(gate, 7), u = up held within ±7 (gpt-oss)

    Args:
        gate_up: (num_tokens, 2 * intermediate), the gate in the first half.

    Returns:
        (num_tokens, intermediate), contiguous, gate_up's dtype.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    match kind:
        case "silu":
            y = F.silu(gate) * up
        case "gelu_tanh":
            y = F.gelu(gate, approximate="tanh") * up
        case "clamped_swiglu":
            gate = gate.clamp(max=7.0)
            y = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)
    return y.to(gate_up.dtype)


def norm_router(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rms_norm` with a residual, then `linear` to the experts' logits; arguments as there.

    Returns:
        The normed sum (num_tokens, size), the logits (num_tokens, num_experts) and x + residual, x's dtype.
    """
    normed, summed = rms_norm(x, norm_weight, eps, residual)
    return normed, linear(normed, router, bias), summed


def route_top_k(
    logits: torch.Tensor, num_picked: int, is_normalized: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick each token's experts: the largest of softmax(logits) (Qwen3, arXiv:2505.09388).

    Args:
        logits: (num_tokens, num_experts).
        num_picked: experts of one token.
        is_normalized: divide the picked probabilities by their sum.

    Returns:
        float32 weights and int64 expert ids, both (num_tokens, num_picked), the largest weight first.
    """
    weights, expert_ids = logits.float().softmax(-1).topk(num_picked, dim=-1)
    return weights / weights.sum(-1, keepdim=True) if is_normalized else weights, expert_ids


def moe_mlp(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Mixture of gated MLPs: y = sum over the token's experts e of weight_e * down_e act(gate_up_e x).

    The experts compute in x's dtype; their sum is float32.

    Args:
        x: (num_tokens, hidden).
        weights: (num_tokens, num_picked) float32, from `route_top_k`.
        expert_ids: (num_tokens, num_picked) int64, no expert twice in a row.
        gate_up: (num_experts, 2 * intermediate, hidden), the gate in the first half.
        down: (num_experts, hidden, intermediate).
        gate_up_bias, down_bias: (num_experts, 2 * intermediate), (num_experts, hidden), added to the
            two products.
        activation: as in `gated_activation`.

    Returns:
        (num_tokens, hidden), x's dtype.
    """
    y = x.new_zeros(x.shape, dtype=torch.float32)
    for expert_id in expert_ids.unique().tolist():
        tokens, picks = torch.where(expert_ids == expert_id)
        inner = F.linear(x[tokens], gate_up[expert_id], _row(gate_up_bias, expert_id))
        out = F.linear(gated_activation(inner, activation), down[expert_id], _row(down_bias, expert_id))
        y.index_add_(0, tokens, out.float() * weights[tokens, picks, None])
    return y.to(x.dtype)


def norm_moe(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    num_picked: int,
    is_normalized: bool,
    *,
    router_bias: torch.Tensor | None = None,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: Activation = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_router`, `route_top_k` and `moe_mlp`, arguments as there; also x + residual, x's dtype."""
    normed, logits, summed = norm_router(x, residual, norm_weight, eps, router, router_bias)
    weights, expert_ids = route_top_k(logits, num_picked, is_normalized)
    mixed = moe_mlp(
        normed,
        weights,
        expert_ids,
        gate_up,
        down,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        activation=activation,
    )
    return mixed, summed


def sum_picks(outs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of what a token's experts gave, in float32: y_t = sum over p of weight_tp * out_tp.

    Args:
        outs: (num_tokens * num_picked, size), a token's picks one after the other, contiguous.
        weights: (num_tokens, num_picked) float32, contiguous.

    Returns:
        (num_tokens, size), outs' dtype.
    """
    of_token = outs.view(*weights.shape, outs.shape[1]).float()
    return (of_token * weights.unsqueeze(-1)).sum(1).to(outs.dtype)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (num_tokens, heads, head_dim) by the angles of each token, (num_tokens, head_dim)."""
    half = x.shape[-1] // 2
    cos, sin = cos_sin.split(half, dim=-1)
    # Whole rows against widened tables: several times faster than arithmetic on strided halves.
    row_cos = torch.cat((cos, cos), dim=-1).unsqueeze(1)
    row_sin = torch.cat((-sin, sin), dim=-1).unsqueeze(1)
    wide = x.float()
    return torch.addcmul(wide * row_cos, wide.roll(half, dims=-1), row_sin).to(x.dtype)


def _row(bias: torch.Tensor | None, index: int) -> torch.Tensor | None:
    return None if bias is None else bias[index]


def _causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    window: int | None,
) -> torch.Tensor:
    """Attention of the last queries of one sequence, (num_queries, heads, head_dim), all float32."""
    num_queries, num_keys = q.shape[0], k.shape[0]
    out = torch.empty_like(q)
    for start in range(0, num_queries, _QUERY_TILE):
        end = min(start + _QUERY_TILE, num_queries)
        end_key = num_keys - num_queries + end
        first_key = 0 if window is None else max(0, num_keys - num_queries + start + 1 - window)
        last = torch.arange(end_key - (end - start), end_key, device=q.device).unsqueeze(1)  # visible to each
        key = torch.arange(first_key, end_key, device=q.device)
        is_visible = key <= last
        if window is not None:
            is_visible &= key > last - window
        tile_k, tile_v = k[first_key:end_key], v[first_key:end_key]
        out[start:end] = _attend(q[start:end], tile_k, tile_v, is_visible, scale, sinks)
    return out


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(scale * q·k) v where (num_queries, num_keys) `is_visible`; see `paged_attention`."""
    if sinks is None:
        return F.scaled_dot_product_attention(
            q[None].transpose(1, 2),
            k[None].transpose(1, 2),
            v[None].transpose(1, 2),
            attn_mask=None if len(q) == 1 else is_visible,
            scale=scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
    grouped = q.unflatten(1, (k.shape[1], -1))  # (num_queries, kv_heads, group, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
    scores.masked_fill_(~is_visible, float("-inf"))
    sink = sinks.float().view(k.shape[1], -1, 1, 1).expand(-1, -1, len(q), -1)
    weights = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x weightᵀ + bias.

    Args:
        x: (num_tokens, size).
        weight: (num_rows, size) contiguous.
        bias: (num_rows,).

    Returns:
        (num_tokens, num_rows), x's dtype; products are summed in float32.
    """
    return F.linear(x, weight, bias)


def norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` with a residual, then `linear`; arguments as there.

    Returns:
        y (num_tokens, num_rows) and x + residual (num_tokens, size), x's dtype.
    """
    normed, summed = rms_norm(x, norm_weight, eps, residual)
    return linear(normed, weight, bias), summed


def norm_gated_linear(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate_up: torch.Tensor,
    kind: Activation = "silu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rms_norm` with a residual, then `linear`, then `gated_activation`; arguments as there.

    Args:
        gate_up: (2 * intermediate, size), the gate in the first half.

    Returns:
        (num_tokens, intermediate) and x + residual (num_tokens, size), x's dtype.
    """
    normed, summed = rms_norm(x, norm_weight, eps, residual)
    return gated_activation(linear(normed, gate_up), kind), summed
