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
        return kernels.quantized_linear(x, self.parts.matrices, self.bias)

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As `Linear.after_norm`."""
        return kernels.quantized_norm_linear(x, residual, norm, eps, self.parts.matrices, self.bias)

    def gated_after_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """As `Linear.gated_after_norm`."""
        return kernels.quantized_norm_gated_linear(x, residual, norm, eps, self.parts.matrices, activation)

    def extra_repr(self) -> str:
        return str(self.parts)


class QuantizedHead(QuantizedLinear):
    """The head, whose logits are not rounded."""

    def forward(self, x: Tensor) -> Tensor:
        """(num_tokens, num_columns) -> float32 (num_tokens, num_rows)."""
        return kernels.quantized_linear(x, self.parts.matrices, self.bias, torch.float32)


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
        picked = kernels.route_top_k(logits, self.moe.num_experts_per_token, self.moe.is_top_k_normalized)
        return self.of_picks(x, *picked), residual

    def of_picks(self, x: Tensor, weights: Tensor, expert_ids: Tensor) -> Tensor:
        """The weighted sum of what a token's picks, both (num_tokens, num_picked), make of x."""
        biases = {"gate_up_bias": self.experts_gate_up_bias, "down_bias": self.experts_down_bias}
        # Every pick reads its expert; unpacking all experts reads each once and writes four times as much.
        if expert_ids.numel() <= 2 * self.moe.num_experts:
            (down,) = self.down.matrices
            return kernels.quantized_moe(
                x, weights, expert_ids, self.gate_up.matrices, down, activation=self.activation, **biases
            )
        return kernels.moe_mlp(
            x,
            weights,
            expert_ids,
            _unpacked(self.gate_up, x.dtype),
            _unpacked(self.down, x.dtype),
            activation=self.activation,
            **biases,
        )

    def extra_repr(self) -> str:
        return f"{self.gate_up}; {self.down}"


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
        linear = QuantizedHead if name == "lm_head" else QuantizedLinear
        new = linear(name, cast("nn.Parameter | None", owner.bias))
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
