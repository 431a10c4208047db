"""Linear layers, alone or behind the norm before them, and the embedding. Their weights come from files:
drawing them first, on the `meta` device, would import torch's compiler, which takes seconds."""

from __future__ import annotations

from torch import Tensor, nn

from dayshift.engine import kernels
from dayshift.engine.models.config import Activation


class Embedding(nn.Embedding):
    """An embedding."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""


class Linear(nn.Linear):
    """A linear layer of `engine.kernels`. A norm in front goes along in one launch for few tokens."""

    def reset_parameters(self) -> None:
        """Leave the weights as they are."""

    def forward(self, input: Tensor) -> Tensor:
        """(num_tokens, in_features) -> (num_tokens, out_features)."""
        return kernels.linear(input, self.weight, self.bias)

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The layer of the normed sum of x and residual; and the sum."""
        return kernels.norm_linear(x, residual, norm, eps, self.weight, self.bias)

    def gated_after_norm(
        self, x: Tensor, residual: Tensor, norm: Tensor, eps: float, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """The same for a layer of gate and up, without bias, with the gated activation behind it."""
        return kernels.norm_gated_linear(x, residual, norm, eps, self.weight, activation)
