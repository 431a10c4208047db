"""Model folders of well-known shapes, to be filled with random weights: speed does not depend on values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dayshift.types import DayshiftError

_SHARD_BYTES = 4 << 30

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 128001,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    },
}

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_shape(name: str, folder: Path) -> Path:
    """Write config.json and a tokenizer of the shape's size into `folder`; load with `dummy` weights.

    Raises DayshiftError for a name that is not in `SHAPES`.
    """
    if name not in SHAPES:
        raise DayshiftError(f"shape {name} is unknown; allowed: {', '.join(SHAPES)}")
    config = SHAPES[name]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    eos = f"<{config['eos_token_id']}>"
    _tokenizer(config["vocab_size"], eos).save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": eos, "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config), encoding="utf-8")
    return folder


def write_random_weights(folder: Path) -> None:
    """Write the weights of a folder with a shape as Hugging Face does: bfloat16, in files of 4 GiB."""
    import torch
    from safetensors.torch import save_file

    from dayshift.engine.models.decoder import Decoder
    from dayshift.engine.models.formats import load_model_config
    from dayshift.engine.models.safetensors_weights import safetensors_names
    from dayshift.engine.models.weights import slot_view

    config = load_model_config(folder)
    with torch.device("meta"):
        model = Decoder(config, num_positions=1)
    parameters = dict(model.named_parameters())
    # One draw for all: what is in a file does not change how fast it is read.
    values = (torch.randn(1 << 16) * 0.02).bfloat16().repeat(_SHARD_BYTES >> 17)
    shard: dict[str, torch.Tensor] = {}
    num_shards, used = 0, 0
    for name, slot in safetensors_names(config).slots(model).items():
        shape = slot_view(parameters[slot.parameter].data, slot, config).shape
        if used + shape.numel() > len(values):
            save_file(shard, folder / f"model-{num_shards:05}.safetensors")
            shard, num_shards, used = {}, num_shards + 1, 0
        shard[name] = values[used : used + shape.numel()].view(shape)
        used += shape.numel()
    save_file(shard, folder / f"model-{num_shards:05}.safetensors")


def _tokenizer(vocab_size: int, eos: str) -> Tokenizer:
    """The 256 bytes, and a name for every other id; only that of `eos` is recognised in a text."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    names += [f"<{token_id}>" for token_id in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos])
    return tokenizer
