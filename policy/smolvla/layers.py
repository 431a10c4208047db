"""Parts that the text layers and the action expert share: rotary positions, attention, gated MLP."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayshift.policy.smolvla.config import LayerShape

_ROPE_BASE = 10_000.0


class Rotary(NamedTuple):
    """Cosines and sines of some positions, each float32 (batch or 1, 1, length, head_dim / 2)."""

    cos: Tensor
    sin: Tensor


class RotaryTable(nn.Module):
    """Cosines and sines of the positions 0 .. num_positions-1.

    angle(p, i) = p / base^(2i / head_dim), in float32 as lerobot computes it.
    Source: Su et al., arXiv:2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, num_positions: int) -> None:
        super().__init__()
        exponents = (2.0 / head_dim) * torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] / _ROPE_BASE**exponents
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, positions: Tensor) -> Rotary:
        """int64 (batch, length) -> the rotation of these positions."""
        return Rotary(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1))


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate (batch, heads, length, head_dim); the two halves of a head are its pairs."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rotary
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def additive_mask(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bool mask -> 0 where attention is allowed, the lowest finite number elsewhere.

    Finite, so that a row with nothing allowed gives numbers and never NaN.
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """softmax(q·k / sqrt(head_dim) + mask) v, heads joined.

    q (batch, heads, queries, head_dim); k, v (batch, kv_heads, keys, head_dim); mask (batch, 1, queries,
    keys). Returns (batch, queries, heads * head_dim).
    """
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """(batch, length, heads * head_dim) -> (batch, heads, length, head_dim)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(batch, heads, length, head_dim) -> (batch, length, heads * head_dim)."""
    return x.transpose(1, 2).flatten(2)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class AttentionLayer(nn.Module):
    """What every pre-norm layer does after its attention; subclasses project the queries."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.o_proj = nn.Linear(shape.q_size, shape.hidden_size, bias=shape.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = GatedMlp(shape)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the projected attention, then the MLP, to (batch, length, hidden_size)."""
        hidden = hidden + self.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class SelfAttentionLayer(AttentionLayer):
    """A layer with queries, keys and values from its own tokens."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        size = shape.q_size + 2 * shape.kv_size
        self.qkv_proj = nn.Linear(shape.hidden_size, size, bias=shape.attention_bias)

    def project(self, hidden: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values, each (batch, heads, length, head_dim)."""
        sizes = (self.shape.q_size, self.shape.kv_size, self.shape.kv_size)
        parts = self.qkv_proj(self.input_layernorm(hidden)).split(sizes, dim=-1)
        q, k, v = (split_heads(part, self.shape.head_dim) for part in parts)
        return rotate(q, rotary), rotate(k, rotary), v
