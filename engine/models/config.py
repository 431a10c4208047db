"""The shape of a model, whatever format describes it. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama 3's frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFactors:
    """The same, worked out: frequency i is divided by `divisors[i]` (GGUF)."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: a router picks `num_experts_per_token` of the experts for every token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    is_top_k_normalized: bool  # the picked experts' weights sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer of the Llama and Qwen families."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | RopeFactors | None
    tie_word_embeddings: bool
    has_qkv_bias: bool  # Qwen2
    has_qk_norm: bool  # Qwen3
    moe: MoeConfig | None = None  # None: a dense MLP in every layer

    @property
    def attention_scale(self) -> float:
        """Factor on the attention logits."""
        return 1.0 / math.sqrt(self.head_dim)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token takes, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
