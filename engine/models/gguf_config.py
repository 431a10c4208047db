"""How a GGUF file describes the shape of its model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from dayshift.engine.models.config import (
    LinearScaling,
    ModelConfig,
    MoeConfig,
    RopeFactors,
    RopeRescaling,
    SlidingWindow,
    YarnScaling,
)
from dayshift.engine.models.gguf_file import GgufFile
from dayshift.types import DayshiftError

# llama.cpp's names of architectures -> Hugging Face's
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "gemma3": "gemma3_text",
}
_SCALING_TYPES = ("none", "linear", "yarn")
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _Fields:
    """Metadata of the file's architecture, such as `llama.block_count`."""

    file: GgufFile

    def require(self, name: str) -> Any:
        value = self.file.require(f"{self.file.architecture}.{name}")
        if isinstance(value, list):
            raise DayshiftError(f"{self.file.path}: a {name} that differs between layers is not supported")
        return value

    def get(self, name: str, default: Any) -> Any:
        is_there = f"{self.file.architecture}.{name}" in self.file.metadata
        return self.require(name) if is_there else default


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Raises DayshiftError for an architecture or option that is not supported."""
    if file.architecture not in MODEL_TYPES:
        raise DayshiftError(
            f"{file.path}: architecture {file.architecture!r} is not supported; "
            f"supported are {', '.join(MODEL_TYPES)}"
        )
    model_type, fields = MODEL_TYPES[file.architecture], _Fields(file)
    num_heads, num_layers = fields.require("attention.head_count"), fields.require("block_count")
    hidden_size = fields.require("embedding_length")
    head_dim = fields.get("attention.key_length", hidden_size // num_heads)
    _check_options(file, fields, head_dim)
    is_gpt_oss, is_gemma3 = model_type == "gpt_oss", model_type == "gemma3_text"
    return ModelConfig(
        model_type=model_type,
        vocab_size=_vocab_size(file),
        hidden_size=hidden_size,
        intermediate_size=fields.require("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=fields.require("context_length"),
        rms_norm_eps=fields.require("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.get("rope.freq_base", 1_000_000.0 if is_gemma3 else 10_000.0),
        rope_scaling=_rope_factors(file) or _rope_scaling(fields, is_truncated=not is_gpt_oss),
        tie_word_embeddings="output.weight" not in file.tensors,
        has_qkv_bias=model_type == "qwen2" or is_gpt_oss,
        has_qk_norm=model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        moe=_moe(fields, is_gpt_oss) if model_type in ("qwen3_moe", "gpt_oss") else None,
        activation="clamped_swiglu" if is_gpt_oss else "gelu_tanh" if is_gemma3 else "silu",
        sliding_window=_sliding_window(fields, num_layers, is_gemma3) if is_gpt_oss or is_gemma3 else None,
        has_o_bias=is_gpt_oss,
        has_sinks=is_gpt_oss,
        has_output_norms=is_gemma3,
        embedding_scale=math.sqrt(hidden_size) if is_gemma3 else 1.0,
        # llama.cpp tells Gemma 3 27B, which scales queries by this, by its number of layers
        query_pre_attn_scalar=hidden_size / num_heads if is_gemma3 and num_layers == 62 else None,
    )


def _check_options(file: GgufFile, fields: _Fields, head_dim: int) -> None:
    """Refuse what would silently be computed wrongly."""
    scaling = fields.get("rope.scaling.type", "none")
    if scaling not in _SCALING_TYPES:
        raise DayshiftError(
            f"{file.path}: rope.scaling.type {scaling!r} is not supported; "
            f"supported: {', '.join(_SCALING_TYPES)}"
        )
    rotated = fields.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise DayshiftError(
            f"{file.path}: rope.dimension_count is {rotated}; only whole heads of {head_dim} are supported"
        )
    if file.architecture not in ("qwen3moe", "gpt-oss") and fields.get("expert_count", 0):
        raise DayshiftError(f"{file.path}: experts are not supported with architecture {file.architecture}")


def _rope_scaling(fields: _Fields, *, is_truncated: bool) -> RopeRescaling | None:
    match fields.get("rope.scaling.type", "none"):
        case "linear":
            return LinearScaling(factor=fields.require("rope.scaling.factor"))
        case "yarn":
            factor = fields.require("rope.scaling.factor")
            return YarnScaling(
                factor=factor,
                beta_fast=fields.get("rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=fields.get("rope.scaling.yarn_beta_slow", 1.0),
                original_max_positions=fields.require("rope.scaling.original_context_length"),
                is_truncated=is_truncated,
                attention_factor=0.1 * math.log(factor) + 1.0,
            )
    return None


def _sliding_window(fields: _Fields, num_layers: int, is_gemma3: bool) -> SlidingWindow:
    """Which layers slide is fixed for an architecture: all but every second, or (Gemma) every sixth."""
    period = 6 if is_gemma3 else 2
    return SlidingWindow(
        size=fields.require("attention.sliding_window"),
        is_sliding=tuple((index + 1) % period != 0 for index in range(num_layers)),
        rope_theta=fields.get("rope.freq_base_swa", 10_000.0) if is_gemma3 else None,
    )


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise DayshiftError(f"{file.path}: the GGUF file has no weight token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _rope_factors(file: GgufFile) -> RopeFactors | None:
    """Llama 3's frequency scaling, which GGUF files hold as one divisor for each frequency."""
    if ROPE_FACTORS not in file.tensors:
        return None
    divisors = file.tensors[ROPE_FACTORS].raw.view(np.float32).ravel()
    return RopeFactors(divisors=tuple(divisors.tolist()))


def _moe(fields: _Fields, is_gpt_oss: bool) -> MoeConfig:
    return MoeConfig(
        num_experts=fields.require("expert_count"),
        num_experts_per_token=fields.require("expert_used_count"),
        intermediate_size=fields.require("expert_feed_forward_length"),
        is_top_k_normalized=True,  # llama.cpp always does so for these architectures
        has_bias=is_gpt_oss,
    )
