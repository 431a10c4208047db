"""Rotary position embedding tables (Su et al., RoFormer, arXiv 2104.09864)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dayshift.engine.models.config import (
    LinearScaling,
    ModelConfig,
    RopeFactors,
    RopeScaling,
    YarnScaling,
)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """float64 (head_dim / 2,), scaled where the model says so."""
    inv_freq = _plain(config.rope_theta, config.head_dim)
    match config.rope_scaling:
        case RopeScaling() as scaling:
            return _llama3(inv_freq, scaling)
        case RopeFactors(divisors=divisors):
            return inv_freq / torch.tensor(divisors, dtype=torch.float64)
        case LinearScaling(factor=factor):
            return inv_freq / factor
        case YarnScaling() as scaling:
            return _yarn(inv_freq, scaling, config.rope_theta)
        case None:
            return inv_freq


def cos_sin_table(config: ModelConfig, num_positions: int) -> Tensor:
    """float32 (num_positions, head_dim): cosines in the first half of a row, sines in the second."""
    factor = config.rope_scaling.attention_factor if isinstance(config.rope_scaling, YarnScaling) else 1.0
    return _table(inverse_frequencies(config), num_positions, factor)


def local_cos_sin_table(config: ModelConfig, num_positions: int) -> Tensor | None:
    """The same for layers with a sliding window; None where these rotate as all others do."""
    if config.sliding_window is None or config.sliding_window.rope_theta is None:
        return None
    return _table(_plain(config.sliding_window.rope_theta, config.head_dim), num_positions, 1.0)


def _plain(theta: float, head_dim: int) -> Tensor:
    return theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _table(inv_freq: Tensor, num_positions: int, factor: float) -> Tensor:
    """Computed in float64: a float32 angle errs by 2e-4 at position 8,192 already."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), inv_freq)
    return (torch.cat((angles.cos(), angles.sin()), dim=-1) * factor).to(torch.float32)


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


def _yarn(inv_freq: Tensor, scaling: YarnScaling, theta: float) -> Tensor:
    half = len(inv_freq)

    def dim_of(num_rotations: float) -> float:
        """The dimension whose frequency makes so many rotations in the original context."""
        wavelengths = scaling.original_max_positions / (num_rotations * 2 * math.pi)
        return half * math.log(wavelengths) / math.log(theta)

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    width = high - low if high > low else 0.001
    interpolated = ((torch.arange(half, dtype=torch.float64) - low) / width).clamp(0, 1)
    return inv_freq / scaling.factor * interpolated + inv_freq * (1 - interpolated)
