"""Parts that the text layers and the action expert share: rotary positions, norm, gated MLP, projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayshift.engine import kernels
from dayshift.policy.smolvla.config import LayerShape
from dayshift.policy.smolvla.heads import KVSlots, Rotary, place_heads
from dayshift.policy.smolvla.row_norm import RowNorm, gate_rows

_ROPE_BASE = 10_000.0


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


def add_linear(hidden: Tensor, linear: nn.Linear, x: Tensor) -> Tensor:
    """hidden + linear(x), in `hidden`'s memory; both (batch, length, size)."""
    if linear.bias is not None:
        return hidden.add_(linear(x))
    hidden.view(-1, hidden.shape[-1]).addmm_(x.flatten(0, -2), linear.weight.t())
    return hidden


class RmsNorm(nn.RMSNorm):
    """torch's, in one launch on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, size) -> the same."""
        if not x.is_cuda:
            return super().forward(x)
        assert self.eps is not None
        return kernels.rms_norm(x.flatten(0, -2), self.weight, self.eps).view(x.shape)


def normed_linear(linear: nn.Linear, norm: RmsNorm, x: Tensor) -> tuple[Tensor, RowNorm | None]:
    """linear(norm(x)); on CUDA without the norm, which is then still due for the rows, and is returned.

    The norm's weights are ones: they have been multiplied into the layer's.
    """
    if x.is_cuda and linear.bias is None:
        assert norm.eps is not None
        return linear(x), RowNorm(x, norm.eps)
    return linear(norm(x)), None


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def add_to(self, hidden: Tensor, norm: RmsNorm) -> Tensor:
        """hidden + the MLP of norm(hidden), in its memory; (batch, length, hidden_size)."""
        gate_up, due = normed_linear(self.gate_up_proj, norm, hidden)
        if due is not None:
            gated = gate_rows(gate_up, due)
        elif gate_up.is_cuda:
            gated = kernels.silu_mul(gate_up.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            gated = F.silu(gate) * up
        return add_linear(hidden, self.down_proj, gated)


class AttentionLayer(nn.Module):
    """What every pre-norm layer does after its attention; subclasses project the queries."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.shape = shape
        self.input_layernorm = RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.o_proj = nn.Linear(shape.q_size, shape.hidden_size, bias=shape.attention_bias)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = GatedMlp(shape)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the projected attention, then the MLP, to (batch, length, hidden_size), in its memory."""
        hidden = add_linear(hidden, self.o_proj, attended)
        return self.mlp.add_to(hidden, self.post_attention_layernorm)


class SelfAttentionLayer(AttentionLayer):
    """A layer with queries, keys and values from its own tokens."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__(shape)
        size = shape.q_size + 2 * shape.kv_size
        self.qkv_proj = nn.Linear(shape.hidden_size, size, bias=shape.attention_bias)

    def project(self, hidden: Tensor, rotary: Rotary, slots: KVSlots) -> Tensor:
        """Rotated queries (batch, heads, length, head_dim); rotated keys and values go into `slots`."""
        rows, norm = normed_linear(self.qkv_proj, self.input_layernorm, hidden)
        return place_heads(rows, rotary, self.shape.num_heads, slots, norm)
