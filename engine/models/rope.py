"""Rotary position embedding tables (Su et al., RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dayshift.engine.models.config import ModelConfig, RopeFactors, RopeScaling


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float64 (head_dim / 2,), scaled where the model says so."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    inv_freq = config.rope_theta**-half
    match config.rope_scaling:
        case RopeScaling() as scaling:
            return _llama3(inv_freq, scaling)
        case RopeFactors(divisors=divisors):
            return inv_freq / torch.tensor(divisors, dtype=torch.float64)
        case None:
            return inv_freq


def cos_sin_table(config: ModelConfig, num_positions: int) -> Tensor:
    """float32 (num_positions, head_dim): cosines in the first half of a row, sines in the second.

    Computed in float64: a float32 angle errs by 2e-4 at position 8,192 already.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), inverse_frequencies(config))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.float32)


def _llama3(inv_freq: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / inv_freq
    low = scaling.original_max_positions / scaling.low_freq_factor
    high = scaling.original_max_positions / scaling.high_freq_factor
    smooth = (scaling.original_max_positions / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    scaled = torch.where(wavelength > low, inv_freq / scaling.factor, inv_freq)
    is_medium = (wavelength <= low) & (wavelength >= high)
    return torch.where(is_medium, blended, scaled)
