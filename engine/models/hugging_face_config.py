"""How the `config.json` of a Hugging Face folder describes the shape of its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dayshift.engine.models.config import ModelConfig, MoeConfig, RopeScaling
from dayshift.types import DayshiftError

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")


def read_hugging_face_config(folder: Path) -> ModelConfig:
    """Raises DayshiftError for an architecture or option that is not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise DayshiftError(f"model folder {folder} has no config.json")
    try:
        raw: dict[str, Any] = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DayshiftError(f"{path} is not valid JSON: {error.msg}") from error
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise DayshiftError(
            f"{path}: model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    _check_options(path, raw)
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling.
    rope = raw.get("rope_parameters") or {}
    scaling = rope or raw.get("rope_scaling") or {}
    return ModelConfig(
        model_type=model_type,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        max_positions=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0),
        rope_scaling=_rope_scaling(path, scaling),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=model_type in ("qwen3", "qwen3_moe"),
        moe=_moe(raw) if model_type == "qwen3_moe" else None,
    )


def _check_options(path: Path, raw: dict[str, Any]) -> None:
    """Refuse what would silently be computed wrongly."""
    for name in ("use_sliding_window", "attention_bias", "mlp_bias"):
        if raw.get(name):
            raise DayshiftError(f"{path}: {name} is not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise DayshiftError(f"{path}: hidden_act {activation!r} is not supported; supported: silu")
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise DayshiftError(f"{path}: dense layers among expert layers are not supported")


def _moe(raw: dict[str, Any]) -> MoeConfig:
    return MoeConfig(
        num_experts=raw.get("num_experts") or raw["num_local_experts"],  # transformers 4 and 5
        num_experts_per_token=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        is_top_k_normalized=raw.get("norm_topk_prob", False),
    )


def _rope_scaling(path: Path, raw: dict[str, Any]) -> RopeScaling | None:
    rope_type = raw.get("rope_type") or raw.get("type") or "default"
    if rope_type == "default":
        return None
    if rope_type != "llama3":
        raise DayshiftError(f"{path}: rope_type {rope_type!r} is not supported; supported: default, llama3")
    return RopeScaling(
        factor=raw["factor"],
        low_freq_factor=raw["low_freq_factor"],
        high_freq_factor=raw["high_freq_factor"],
        original_max_positions=raw["original_max_position_embeddings"],
    )
