"""How a GGUF file describes the shape of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dayshift.engine.models.config import ModelConfig, MoeConfig, RopeFactors
from dayshift.engine.models.gguf_file import GgufFile
from dayshift.types import DayshiftError

# llama.cpp's names of architectures -> Hugging Face's
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
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
    num_heads = fields.require("attention.head_count")
    head_dim = fields.get("attention.key_length", fields.require("embedding_length") // num_heads)
    _check_options(file, fields, head_dim)
    return ModelConfig(
        model_type=model_type,
        vocab_size=_vocab_size(file),
        hidden_size=fields.require("embedding_length"),
        intermediate_size=fields.require("feed_forward_length"),
        num_layers=fields.require("block_count"),
        num_heads=num_heads,
        num_kv_heads=fields.get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=fields.require("context_length"),
        rms_norm_eps=fields.require("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.get("rope.freq_base", 10_000.0),
        rope_scaling=_rope_factors(file),
        tie_word_embeddings="output.weight" not in file.tensors,
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=model_type in ("qwen3", "qwen3_moe"),
        moe=_moe(fields) if model_type == "qwen3_moe" else None,
    )


def _check_options(file: GgufFile, fields: _Fields, head_dim: int) -> None:
    """Refuse what would silently be computed wrongly."""
    scaling = fields.get("rope.scaling.type", "none")
    if scaling != "none":
        raise DayshiftError(f"{file.path}: rope.scaling.type {scaling!r} is not supported; supported: none")
    rotated = fields.get("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise DayshiftError(
            f"{file.path}: rope.dimension_count is {rotated}; only whole heads of {head_dim} are supported"
        )
    if file.architecture != "qwen3moe" and fields.get("expert_count", 0):
        raise DayshiftError(f"{file.path}: experts are not supported with architecture {file.architecture}")


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


def _moe(fields: _Fields) -> MoeConfig:
    return MoeConfig(
        num_experts=fields.require("expert_count"),
        num_experts_per_token=fields.require("expert_used_count"),
        intermediate_size=fields.require("expert_feed_forward_length"),
        is_top_k_normalized=True,  # llama.cpp always does so for this architecture
    )
