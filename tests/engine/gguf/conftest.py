"""Small GGUF files: a Hugging Face folder's model written as llama.cpp's converter writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, TokenType
from safetensors.numpy import load_file

from dayshift.engine.models.gguf_file import gguf_parts

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
}
_MODEL_ARCHS = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """`write_gguf(folder, quant_type, divisors=..., metadata=...)`: the folder's model as a GGUF file.

    Matrices are quantised as `quant_type`, those whose names end in a key of `others` as its value;
    `divisors` are those of rope's frequencies; `metadata` is written instead of the values that the
    folder implies; `num_parts` files share the weights.
    """

    def write(
        folder: Path,
        quant_type: GGMLQuantizationType = GGMLQuantizationType.F32,
        *,
        divisors: np.ndarray | None = None,
        metadata: Mapping[str, Any] | None = None,
        others: Mapping[str, GGMLQuantizationType] | None = None,
        num_parts: int = 1,
    ) -> Path:
        config = json.loads((folder / "config.json").read_text())
        path = tmp_path / f"{folder.name}.{quant_type.name}.gguf"
        tensors = _tensors(config, load_file(folder / "model.safetensors"))
        writer = gguf.GGUFWriter(
            path,
            ARCHITECTURES[config["model_type"]],
            split_max_tensors=-(-len(tensors) // num_parts) if num_parts > 1 else 0,
        )
        for key, value in (_metadata(folder, config) | dict(metadata or {})).items():
            _add(writer, key, value)
        for name, weight in tensors.items():
            if weight.ndim == 1 or name.endswith(".bias"):
                writer.add_tensor(name, weight)
            else:
                found = (other for end, other in (others or {}).items() if name.endswith(end))
                its_type = next(found, quant_type)
                writer.add_tensor(name, gguf.quantize(weight, its_type), raw_dtype=its_type)
        if divisors is not None:
            writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (
            path
            if num_parts == 1
            else gguf_parts(path.with_name(f"{path.stem}-00001-of-{num_parts:05}.gguf"))[0]
        )

    return write


def _metadata(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    arch = ARCHITECTURES[config["model_type"]]
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    special = {token["content"] for token in tokenizer["added_tokens"]}
    fields = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": config["head_dim"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": [
            int(TokenType.CONTROL if token in special else TokenType.NORMAL) for token in vocab
        ],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": json.loads((folder / "tokenizer_config.json").read_text())[
            "chat_template"
        ],
    }
    if "num_experts_per_tok" in config:
        is_gpt_oss = config["model_type"] == "gpt_oss"
        fields |= {
            f"{arch}.expert_count": config["num_local_experts" if is_gpt_oss else "num_experts"],
            f"{arch}.expert_used_count": config["num_experts_per_tok"],
            f"{arch}.expert_feed_forward_length": config[
                "intermediate_size" if is_gpt_oss else "moe_intermediate_size"
            ],
        }
    if "sliding_window" in config:
        scaling = config["rope_scaling"]
        fields |= {
            f"{arch}.attention.sliding_window": config["sliding_window"],
            f"{arch}.rope.scaling.type": scaling["rope_type"],
            f"{arch}.rope.scaling.factor": scaling["factor"],
        }
        if "original_max_position_embeddings" in scaling:
            original = scaling["original_max_position_embeddings"]
            fields[f"{arch}.rope.scaling.original_context_length"] = original
    return fields


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _tensors(config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(_MODEL_ARCHS[config["model_type"]], config["num_hidden_layers"])
    tensors: dict[str, np.ndarray] = {}
    experts: dict[str, list[np.ndarray]] = {}
    for name, weight in weights.items():
        if config["model_type"] == "gpt_oss" and ".experts." in name:
            tensors |= _gpt_oss_experts(name, weight)
            continue
        if name.endswith("self_attn.sinks"):
            tensors[f"{_gguf_name(names, name)}.weight"] = weight
            continue
        if config["model_type"] == "gemma3_text" and weight.ndim == 1:
            weight = weight + 1
        prefix, is_expert, rest = name.partition(".experts.")
        if is_expert:  # in the file's order, which is that of their numbers
            experts.setdefault(f"{prefix}.experts.{rest.split('.')[1]}", []).append(weight)
            continue
        if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            halves = weight.reshape(-1, 2, config["head_dim"] // 2, weight.shape[1])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        tensors[_gguf_name(names, name)] = weight
    for name, matrices in experts.items():
        tensors[_gguf_name(names, f"{name}.weight")] = np.stack(matrices)
    return tensors


def _gpt_oss_experts(name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    layer, is_bias = name.split(".")[2], name.endswith("_bias")
    rows = weight if is_bias else weight.swapaxes(1, 2)
    kind = "bias" if is_bias else "weight"
    if "down_proj" in name:
        return {f"blk.{layer}.ffn_down_exps.{kind}": np.ascontiguousarray(rows)}
    gate, up = np.ascontiguousarray(rows[:, ::2]), np.ascontiguousarray(rows[:, 1::2])
    return {f"blk.{layer}.ffn_gate_exps.{kind}": gate, f"blk.{layer}.ffn_up_exps.{kind}": up}


def _gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found
