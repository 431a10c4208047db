"""Layers of `Decoder` whose weights stay quantised in memory.

They stand in for `nn.Linear` and `SparseMoe` where a file's weights are packed. Their matrices are no
parameters: they are never cast, and never on the `meta` device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from dayshift.engine import kernels
from dayshift.engine.models.config import Activation
from dayshift.engine.models.decoder import SparseMoe
from dayshift.engine.models.weights import Part
from dayshift.engine.quant.packed import PackedMatrix, below

_PARTS: Mapping[str, tuple[Part, ...]] = {
    "qkv_proj": ("q", "k", "v"),
    "gate_up_proj": ("gate", "up"),
    "experts_gate_up": ("gate", "up"),
}


class PackedParts:
    """The matrices that a fused parameter is put together from, those of the same type as one."""

    def __init__(self, parameter: str) -> None:
        self.matrices: list[PackedMatrix] = []
        self._parts = _PARTS.get(parameter, ())
        self._found: dict[Part, PackedMatrix] = {}

    def put(self, part: Part | None, matrix: PackedMatrix) -> None:
        """Take a part, or (None) the whole. `matrices` is complete when all have come, in any order."""
        if part is None:
            self.matrices = [matrix]
            return
        self._found[part] = matrix
        if len(self._found) < len(self._parts):
            return
        for name in self._parts:
            found = self._found[name]
            if self.matrices and self.matrices[-1].quant_type == found.quant_type:
                self.matrices[-1] = below(self.matrices[-1], found)
            else:
                self.matrices.append(found)
        self._found.clear()

    def __str__(self) -> str:
        return ", ".join(f"{matrix.quant_type.name} x {matrix.num_rows}" for matrix in self.matrices)


class QuantizedLinear(nn.Module):
    """`nn.Linear` with quantised parts, one below the other, each of its own type."""

    def __init__(self, name: str, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.bias = bias
        self.parts = PackedParts(name)

    def forward(self, x: Tensor) -> Tensor:
        """(num_tokens, num_columns) -> (num_tokens, num_rows of all parts)."""
        outs = [kernels.quantized_linear(x, matrix) for matrix in self.parts.matrices]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)
        return out if self.bias is None else out + self.bias

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As `Linear.after_norm`."""
        x, residual = kernels.rms_norm(x, norm, eps, residual)
        return self(x), residual

    def gated_after_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """As `Linear.gated_after_norm`."""
        gate_up, residual = self.after_norm(x, residual, norm, eps)
        return kernels.gated_activation(gate_up, activation), residual

    def extra_repr(self) -> str:
        return str(self.parts)


class QuantizedMoe(nn.Module):
    """`SparseMoe` with quantised experts; the router and all biases stay as they are."""

    def __init__(self, layer: SparseMoe) -> None:
        super().__init__()
        self.moe, self.eps, self.router = layer.moe, layer.eps, layer.router
        self.activation: Activation = layer.activation
        self.experts_gate_up_bias = layer.experts_gate_up_bias
        self.experts_down_bias = layer.experts_down_bias
        self.gate_up = PackedParts("experts_gate_up")
        self.down = PackedParts("experts_down")

    def forward(self, hidden: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of the normed sum of hidden and residual; and the sum."""
        x, logits, residual = kernels.norm_router(
            hidden, residual, norm, self.eps, self.router.weight, self.router.bias
        )
        return self._mixed(x, logits), residual

    def extra_repr(self) -> str:
        return f"{self.gate_up}; {self.down}"

    def _mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, expert_ids = kernels.route_top_k(
            logits, self.moe.num_experts_per_token, self.moe.is_top_k_normalized
        )
        # Every pick reads its expert; unpacking all experts reads each once and writes four times as much.
        if expert_ids.numel() <= 2 * self.moe.num_experts:
            return self._by_pick(x, weights, expert_ids)
        return kernels.moe_mlp(
            x,
            weights,
            expert_ids,
            _unpacked(self.gate_up, x.dtype),
            _unpacked(self.down, x.dtype),
            gate_up_bias=self.experts_gate_up_bias,
            down_bias=self.experts_down_bias,
            activation=self.activation,
        )

    def _by_pick(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        of_pick = expert_ids.flatten()
        inner = _of_experts(x, expert_ids, self.gate_up)
        if self.experts_gate_up_bias is not None:
            inner = inner + self.experts_gate_up_bias[of_pick]
        out = _of_experts(kernels.gated_activation(inner, self.activation), expert_ids, self.down)
        if self.experts_down_bias is not None:
            out = out + self.experts_down_bias[of_pick]
        return kernels.sum_picks(out, weights)


def _of_experts(x: Tensor, expert_ids: Tensor, parts: PackedParts) -> Tensor:
    outs = [kernels.quantized_experts(x, expert_ids, matrix) for matrix in parts.matrices]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


def _unpacked(parts: PackedParts, dtype: torch.dtype) -> Tensor:
    """(num_experts, num_rows of all parts, num_columns)."""
    weights = [kernels.dequantize_packed(matrix, dtype) for matrix in parts.matrices]
    return weights[0] if len(weights) == 1 else torch.cat(weights, dim=1)


def replace_by_quantized(model: nn.Module, parameter: str) -> None:
    """Put a layer for quantised weights where the one is that owns `parameter`."""
    owner_name, _, _ = parameter.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(owner, QuantizedLinear | QuantizedMoe):
        return
    parent_name, _, name = owner_name.rpartition(".")
    if isinstance(owner, SparseMoe):
        new: nn.Module = QuantizedMoe(owner)
    else:
        new = QuantizedLinear(name, cast("nn.Parameter | None", owner.bias))
    setattr(model.get_submodule(parent_name), name, new)


def put_packed(model: nn.Module, parameter: str, part: Part | None, matrix: PackedMatrix) -> None:
    """Give a replaced layer a matrix of its own."""
    owner_name, _, name = parameter.rpartition(".")
    owner = model.get_submodule(owner_name)
    if isinstance(owner, QuantizedLinear):
        owner.parts.put(part, matrix)
    else:
        assert isinstance(owner, QuantizedMoe)
        (owner.gate_up if name == "experts_gate_up" else owner.down).put(part, matrix)
