"""The shape of a model, whatever format describes it. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""What a gated MLP does with its gate and its other half; see `kernels.gated_activation`."""


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
class LinearScaling:
    """All frequencies divided by one factor (`rope_type: linear`, Gemma 3)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., arXiv:2309.00071): low frequencies are interpolated, high ones kept.

    Between `beta_slow` and `beta_fast` rotations in the original context the two are blended;
    `is_truncated` widens that range to whole dimensions. Cosines and sines are multiplied by
    `attention_factor`.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_positions: int
    is_truncated: bool
    attention_factor: float


RopeRescaling = RopeScaling | RopeFactors | LinearScaling | YarnScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """Layers in which a token attends itself and the `size - 1` tokens before it, no more.

    `rope_theta`: of these layers, unscaled; None: they rotate as all others do.
    """

    size: int
    is_sliding: tuple[bool, ...]  # for each layer
    rope_theta: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """Mixture of experts: a router picks `num_experts_per_token` of the experts for every token."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    is_top_k_normalized: bool  # the picked experts' weights sum to 1
    has_bias: bool = False  # router and experts, gpt-oss


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer of the Llama, Qwen, gpt-oss and Gemma families."""

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
    rope_scaling: RopeRescaling | None
    tie_word_embeddings: bool
    has_qkv_bias: bool  # Qwen2
    has_qk_norm: bool  # Qwen3
    moe: MoeConfig | None = None  # None: a dense MLP in every layer
    activation: Activation = "silu"
    sliding_window: SlidingWindow | None = None  # None: every layer sees the whole context
    has_o_bias: bool = False  # gpt-oss
    has_sinks: bool = False  # gpt-oss: a learned logit for each head, which takes attention and gives nothing
    has_output_norms: bool = False  # Gemma 3: what attention and MLP give is normed before it is added
    embedding_scale: float = 1.0  # Gemma 3
    query_pre_attn_scalar: float | None = None  # Gemma 3; None: head_dim

    @property
    def attention_scale(self) -> float:
        """Factor on the attention logits."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def window_of_layer(self, index: int) -> int | None:
        """Tokens that a token of this layer sees, itself included; None: all before it."""
        window = self.sliding_window
        return window.size if window is not None and window.is_sliding[index] else None

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of keys and values that one token takes, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
