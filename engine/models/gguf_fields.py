"""The metadata of a GGUF file that is to be written: the inverse of `gguf_config` and `gguf_tokenizer`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import TokenType

from dayshift.engine.models.config import LinearScaling, ModelConfig, RopeScaling, YarnScaling
from dayshift.engine.models.formats import is_gguf
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.models.gguf_tokenizer import PATTERNS
from dayshift.engine.tokenizer_files import read_tokenizer_folder
from dayshift.types import DayshiftError


def config_fields(config: ModelConfig, architecture: str) -> dict[str, Any]:
    """Raises DayshiftError for a rope scaling that GGUF holds as a weight."""
    fields: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
    }
    if config.moe is not None:
        fields |= {
            "expert_count": config.moe.num_experts,
            "expert_used_count": config.moe.num_experts_per_token,
            "expert_feed_forward_length": config.moe.intermediate_size,
        }
    if config.sliding_window is not None:
        fields["attention.sliding_window"] = config.sliding_window.size
    match config.rope_scaling:
        case LinearScaling(factor=factor):
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
        case YarnScaling() as scaling:
            fields |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": scaling.factor,
                "rope.scaling.original_context_length": scaling.original_max_positions,
            }
        case RopeScaling():
            raise DayshiftError("rope scaling llama3 cannot be written to a GGUF file yet; keep the folder")
        case _:
            pass
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def tokenizer_fields(model: Path) -> dict[str, Any]:
    """Of a GGUF file its own; of a folder those of its tokenizer.json.

    Raises DayshiftError for a tokenizer that is not byte-level BPE, or cuts texts in a way that
    llama.cpp has no name for.
    """
    if is_gguf(model):
        metadata = open_gguf(model).metadata
        return {name: value for name, value in metadata.items() if name.startswith("tokenizer.")}
    parts = read_tokenizer_folder(model)
    raw = json.loads(parts.tokenizer.to_str())
    if raw["model"]["type"] != "BPE":
        raise DayshiftError(f"{model}: only byte-level BPE tokenizers can be written to a GGUF file")
    special = {token["id"]: token["special"] for token in raw["added_tokens"]}
    vocab = parts.tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    if [vocab[token] for token in tokens] != list(range(len(tokens))):
        raise DayshiftError(f"{model}: the tokenizer leaves out token ids")
    kinds = {True: TokenType.CONTROL, False: TokenType.USER_DEFINED, None: TokenType.NORMAL}
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre(model, raw["pre_tokenizer"]),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kinds[special.get(index)]) for index in range(len(tokens))],
        "tokenizer.ggml.merges": [
            merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]
        ],
        "tokenizer.ggml.add_bos_token": bool(parts.tokenizer.encode("").ids),
    }
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding")):
        if (token := parts.special_tokens.get(name)) in vocab:
            fields[f"tokenizer.ggml.{key}_token_id"] = vocab[token]
    if parts.chat_template is not None:
        fields["tokenizer.chat_template"] = parts.chat_template
    return fields


def _pre(model: Path, pre_tokenizer: dict[str, Any] | None) -> str:
    """llama.cpp's name of how a text is cut before merges apply."""
    steps = (pre_tokenizer or {}).get("pretokenizers", [pre_tokenizer])
    match steps:
        case [{"type": "Split", "pattern": {"Regex": pattern}}, {"type": "ByteLevel"}]:
            names = [name for name, known in PATTERNS.items() if known == pattern]
            if names:
                return names[0]
        case [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "use_regex": True}]:
            return "smollm"
        case [{"type": "ByteLevel", "use_regex": True}]:
            return "gpt-2"
        case _:
            pass
    raise DayshiftError(
        f"{model}: its tokenizer cuts texts by a rule of its own, and a GGUF file can only name one of "
        f"llama.cpp's ({', '.join((*PATTERNS, 'smollm', 'gpt-2'))}); "
        "it can be written to a folder (F32, F16 or BF16)"
    )
