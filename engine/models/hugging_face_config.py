"""How the `config.json` of a Hugging Face folder describes the shape of its model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dayshift.engine.models.config import (
    Activation,
    LinearScaling,
    ModelConfig,
    MoeConfig,
    RopeRescaling,
    RopeScaling,
    SlidingWindow,
    YarnScaling,
)
from dayshift.types import DayshiftError


class UnsupportedModelError(DayshiftError):
    """An architecture or option that our decoder does not compute; `transformers` may."""


SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "gemma3")

# What published Gemma 3 folders leave out, because it is transformers' default.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_hugging_face_config(folder: Path) -> ModelConfig:
    """Raises UnsupportedModelError for an architecture or option that is not supported, DayshiftError for
    a file that is missing or damaged."""
    path = folder / "config.json"
    raw = read_config_json(folder)
    model_type = raw.get("model_type")
    if model_type not in SUPPORTED:
        raise UnsupportedModelError(
            f"{path}: model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED)}"
        )
    if model_type == "gemma3":  # with a vision tower, which is left out
        raw, model_type = raw["text_config"], "gemma3_text"
    if model_type == "gemma3_text":
        raw = _GEMMA3_DEFAULTS | raw
    _check_options(path, raw, model_type)
    is_gpt_oss, is_gemma3 = model_type == "gpt_oss", model_type == "gemma3_text"
    theta, scaling = _rope(raw)
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
        rope_theta=theta,
        rope_scaling=_rope_scaling(path, scaling),
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        has_qkv_bias=model_type == "qwen2" or is_gpt_oss,
        has_qk_norm=model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        moe=_moe(raw, model_type) if model_type in ("qwen3_moe", "gpt_oss") else None,
        activation="clamped_swiglu" if is_gpt_oss else _ACTIVATIONS[_activation_name(raw)],
        sliding_window=_sliding_window(raw, is_gemma3) if is_gpt_oss or is_gemma3 else None,
        has_o_bias=is_gpt_oss,
        has_sinks=is_gpt_oss,
        has_output_norms=is_gemma3,
        embedding_scale=math.sqrt(raw["hidden_size"]) if is_gemma3 else 1.0,
        query_pre_attn_scalar=raw["query_pre_attn_scalar"] if is_gemma3 else None,
    )


def read_config_json(folder: Path) -> dict[str, Any]:
    """The `config.json` of a model folder. Raises DayshiftError when there is none or it is damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise DayshiftError(f"model folder {folder} has no config.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DayshiftError(f"{path} is not valid JSON: {error.msg}") from error
    if not isinstance(raw, dict):
        raise DayshiftError(f"{path} is not a JSON object")
    return raw


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_hugging_face_config`, for all architectures but gpt-oss.

    Raises DayshiftError for a rope scaling that is known by its divisors only.
    """
    fields: dict[str, Any] = {
        "architectures": [_CLASSES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.moe is not None:
        fields |= {
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.num_experts_per_token,
            "moe_intermediate_size": config.moe.intermediate_size,
            "norm_topk_prob": config.moe.is_top_k_normalized,
        }
    if (window := config.sliding_window) is not None:
        kinds = {True: "sliding_attention", False: "full_attention"}
        fields |= {
            "sliding_window": window.size,
            "layer_types": [kinds[is_sliding] for is_sliding in window.is_sliding],
            "rope_local_base_freq": window.rope_theta,
            "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
        }
    match config.rope_scaling:
        case LinearScaling(factor=factor):
            fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
        case RopeScaling() as scaling:
            fields["rope_scaling"] = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        case YarnScaling() as scaling:
            fields["rope_scaling"] = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
                "original_max_position_embeddings": scaling.original_max_positions,
                "truncate": scaling.is_truncated,
                "attention_factor": scaling.attention_factor,
            }
        case None:
            pass
        case _:
            raise DayshiftError("a GGUF file's rope divisors cannot be written to a config.json")
    return fields


def _check_options(path: Path, raw: dict[str, Any], model_type: str) -> None:
    """Refuse what would silently be computed wrongly."""
    refused = ["use_sliding_window", "mlp_bias", "use_bidirectional_attention"]
    refused += ["attn_logit_softcapping", "final_logit_softcapping"]
    refused += [] if model_type == "gpt_oss" else ["attention_bias"]
    for name in refused:
        if raw.get(name):
            raise UnsupportedModelError(f"{path}: {name} is not supported")
    if model_type == "gpt_oss" and not raw.get("attention_bias", True):
        raise UnsupportedModelError(f"{path}: attention_bias false is not supported with model_type gpt_oss")
    if raw.get("swiglu_limit", 7.0) != 7.0:
        limit = raw["swiglu_limit"]
        raise UnsupportedModelError(f"{path}: swiglu_limit {limit} is not supported; supported: 7.0")
    activation = _activation_name(raw)
    if activation not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{path}: hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedModelError(f"{path}: dense layers among expert layers are not supported")
    method = (raw.get("quantization_config") or {}).get("quant_method")
    if method is not None and (method, model_type) != ("mxfp4", "gpt_oss"):
        raise UnsupportedModelError(
            f"{path}: quant_method {method!r} is not supported; supported: mxfp4 of gpt_oss, and GGUF files"
        )


def _activation_name(raw: dict[str, Any]) -> str:
    return raw.get("hidden_activation") or raw.get("hidden_act", "silu")


def _moe(raw: dict[str, Any], model_type: str) -> MoeConfig:
    is_gpt_oss = model_type == "gpt_oss"
    return MoeConfig(
        num_experts=raw.get("num_experts") or raw["num_local_experts"],  # transformers 4 and 5
        num_experts_per_token=raw.get("num_experts_per_tok") or raw["experts_per_token"],
        intermediate_size=raw["intermediate_size"] if is_gpt_oss else raw["moe_intermediate_size"],
        # gpt-oss takes the softmax over the picked experts only, which is the same
        is_top_k_normalized=is_gpt_oss or raw.get("norm_topk_prob", False),
        has_bias=is_gpt_oss,
    )


def _sliding_window(raw: dict[str, Any], is_gemma3: bool) -> SlidingWindow:
    num_layers = raw["num_hidden_layers"]
    pattern = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    if raw.get("layer_types"):
        is_sliding = tuple(kind == "sliding_attention" for kind in raw["layer_types"])
    else:
        period = pattern if is_gemma3 else 2
        is_sliding = tuple((index + 1) % period != 0 for index in range(num_layers))
    local = (raw.get("rope_parameters") or {}).get("sliding_attention", {})
    theta = float(local.get("rope_theta") or raw["rope_local_base_freq"]) if is_gemma3 else None
    return SlidingWindow(size=raw["sliding_window"], is_sliding=is_sliding, rope_theta=theta)


def _rope(raw: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Theta and scaling: transformers 5 writes rope_parameters; older files have rope_theta and
    rope_scaling. Where layers differ, those of the layers that see everything."""
    rope = raw.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta = float(rope.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    return theta, rope or raw.get("rope_scaling") or {}


def _rope_scaling(path: Path, raw: dict[str, Any]) -> RopeRescaling | None:
    match raw.get("rope_type") or raw.get("type") or "default":
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=raw["factor"])
        case "llama3":
            return RopeScaling(
                factor=raw["factor"],
                low_freq_factor=raw["low_freq_factor"],
                high_freq_factor=raw["high_freq_factor"],
                original_max_positions=raw["original_max_position_embeddings"],
            )
        case "yarn" if not raw.get("mscale"):
            return YarnScaling(
                factor=raw["factor"],
                beta_fast=raw.get("beta_fast") or 32.0,
                beta_slow=raw.get("beta_slow") or 1.0,
                original_max_positions=raw["original_max_position_embeddings"],
                is_truncated=raw.get("truncate", True),
                attention_factor=raw.get("attention_factor") or 0.1 * math.log(raw["factor"]) + 1.0,
            )
        case other:
            raise UnsupportedModelError(
                f"{path}: rope_type {other!r} is not supported; supported: default, linear, llama3, yarn "
                "(without mscale)"
            )
