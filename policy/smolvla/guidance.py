"""Real-time chunking: a new chunk is guided to agree with what the robot is still executing.

In every Euler step the velocity is corrected so that the clean actions it points at, x0 = x_t - t v, come
closer to the running chunk's actions y, by weights w that are 1 for the actions which are executed before
the new chunk arrives, fall behind them, and are 0 where the new chunk is free:

    v' = v - g(t) w (y - x0),  g(t) = min(MAX_GUIDANCE, (1 - s) / s * ((1 - s)² + s²) / (1 - s)²),  s = 1 - t

Source: Black et al., arXiv:2506.07339 (there with the Jacobian of x0, which lerobot 0.6.1 takes as the
identity, and so do we: no backward pass).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_GUIDANCE = 10.0  # lerobot's default


@dataclass(frozen=True, slots=True)
class Guidance:
    """For a batch. Rows with weights 0 are not guided."""

    target: Tensor  # float32 (batch, chunk_size, max_action_dim), normalised: the running chunk's actions
    weights: Tensor  # float32 (batch, chunk_size, 1)

    def correct(self, velocity: Tensor, actions: Tensor, time: float) -> Tensor:
        """float32 velocity and actions (batch, chunk_size, max_action_dim) at flow time `time` -> v'."""
        error = self.target - (actions - time * velocity)
        return velocity - guidance_strength(time) * self.weights * error


def guidance_strength(time: float) -> float:
    """g(t) for flow time t from 1 (noise) towards 0."""
    s = 1.0 - time
    if s <= 0.0:
        return MAX_GUIDANCE
    return min(MAX_GUIDANCE, (1 - s) / s * ((1 - s) ** 2 + s**2) / (1 - s) ** 2)


def guidance_weights(num_frozen: int, num_guided: int, chunk_size: int) -> Tensor:
    """float32 (chunk_size,): 1 up to `num_frozen`, then w (e^w - 1) / (e - 1) with w falling linearly to 0
    at `num_guided`, then 0."""
    num_guided = min(num_guided, chunk_size)
    num_frozen = min(num_frozen, num_guided)
    falling = torch.linspace(1, 0, num_guided - num_frozen + 2)[1:-1]
    weights = torch.zeros(chunk_size)
    weights[:num_frozen] = 1.0
    weights[num_frozen:num_guided] = falling * torch.expm1(falling) / (math.e - 1)
    return weights
