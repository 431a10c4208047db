"""Small models with random weights, written as Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

VOCAB_SIZE = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_GPT_OSS = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 64,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_theta": 1000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
_GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 1000.0,
    "rope_local_base_freq": 100.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
}
_CORPUS = (
    "Shift 1, job 2, step 3: put the bowl on the plate. Result: done. Result: failed, attempt 1 of 2. "
    "Review of shift 1: list every step given up in shift 1. Turn on the stove, open the middle drawer of "
    "the cabinet, push the plate to the front of the stove, put the wine bottle on top of the rack. "
    '{"action":"execute","task":"open the drawer"} {"action":"next"} {"redo":[{"job":1,"step":2}]} '
    "system user assistant You lead a robot through shifts of jobs. The quick brown fox jumps over the "
    "lazy dog while five boxing wizards jump quickly past a sphinx of black quartz, judging my vow. "
    "Small models with random weights answer anything at all; whatever they say, the same question must "
    "bring the same answer, streamed or whole, parked and restored, archived and recalled again later."
)


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a model folder: Qwen3 by default, four layers, fp32, byte-level BPE of 512, ChatML.

    `make_tiny_model(seed=1, num_hidden_layers=2, ...)`: other weights and any field of config.json;
    `model_type="llama"` leaves out the norms of queries and keys, "qwen2" adds biases, "qwen3_moe" and
    "gpt_oss" have eight experts, "gpt_oss" and "gemma3_text" layers with a window of 24 tokens.
    """

    def make(seed: int = 0, **config_fields: Any) -> Path:
        folder = tmp_path_factory.mktemp("tiny_model")
        config = _config(**config_fields)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        save_file(_random_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
        _byte_level_bpe().save(str(folder / "tokenizer.json"))
        tokenizer_config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "chat_template": CHATML,
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_tiny_model: Callable[..., Path]) -> Path:
    """One tiny Qwen3 for all tests that do not care which."""
    return make_tiny_model()


def _config(**fields: Any) -> dict[str, Any]:
    model_type = fields.pop("model_type", "qwen3")
    config = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    if model_type == "qwen3_moe":
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    if model_type == "gpt_oss":
        config |= _GPT_OSS
    if model_type == "gemma3_text":
        config |= _GEMMA3
    return config | fields


def _random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q_width = config["num_attention_heads"] * head_dim
    kv_width = config["num_key_value_heads"] * head_dim

    # Strong layers over a weak embedding: otherwise a tied model repeats its last token for ever,
    # and no test would notice wrong attention.
    def matrix(num_out: int, num_in: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(num_out, num_in, generator=generator) * gain * num_in**-0.5

    def vector(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return 0.1 * vector(size) + (0 if config["model_type"] == "gemma3_text" else 1)

    def gated_mlp(prefix: str, size: int) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}.gate_proj.weight": matrix(size, hidden),
            f"{prefix}.up_proj.weight": matrix(size, hidden),
            f"{prefix}.down_proj.weight": matrix(hidden, size, gain=3.0),
        }

    def gpt_oss_mlp() -> dict[str, torch.Tensor]:
        num_experts, size = config["num_local_experts"], config["intermediate_size"]
        return {
            "mlp.router.weight": matrix(num_experts, hidden),
            "mlp.router.bias": vector(num_experts),
            "mlp.experts.gate_up_proj": 3.0 * vector(num_experts, hidden, 2 * size) * hidden**-0.5,
            "mlp.experts.gate_up_proj_bias": vector(num_experts, 2 * size),
            "mlp.experts.down_proj": 3.0 * vector(num_experts, size, hidden) * size**-0.5,
            "mlp.experts.down_proj_bias": vector(num_experts, hidden),
        }

    def mlp() -> dict[str, torch.Tensor]:
        if config["model_type"] == "gpt_oss":
            return gpt_oss_mlp()
        if config["model_type"] != "qwen3_moe":
            return gated_mlp("mlp", config["intermediate_size"])
        weights = {"mlp.gate.weight": matrix(config["num_experts"], hidden)}
        for expert in range(config["num_experts"]):
            weights |= gated_mlp(f"mlp.experts.{expert}", config["moe_intermediate_size"])
        return weights

    embedding = torch.randn(config["vocab_size"], hidden, generator=generator) * 0.1
    weights = {"model.embed_tokens.weight": embedding}
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": matrix(q_width, hidden, gain=3.0),
            "self_attn.k_proj.weight": matrix(kv_width, hidden),
            "self_attn.v_proj.weight": matrix(kv_width, hidden),
            "self_attn.o_proj.weight": matrix(hidden, q_width, gain=3.0),
            "post_attention_layernorm.weight": norm(hidden),
            **mlp(),
        }
        if config["model_type"] in ("qwen2", "gpt_oss"):
            for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                layer[f"self_attn.{name}_proj.bias"] = vector(width)
        if config["model_type"] == "gpt_oss":
            layer |= {"self_attn.o_proj.bias": vector(hidden)}
            layer |= {"self_attn.sinks": 2.0 * vector(config["num_attention_heads"])}
        if config["model_type"] == "gemma3_text":
            layer["pre_feedforward_layernorm.weight"] = norm(hidden)
            layer["post_feedforward_layernorm.weight"] = norm(hidden)
        if config["model_type"] in ("qwen3", "qwen3_moe", "gemma3_text"):
            layer |= {"self_attn.q_norm.weight": norm(head_dim), "self_attn.k_norm.weight": norm(head_dim)}
        weights |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    weights["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    return weights


def _byte_level_bpe() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError("the corpus is too short for the vocabulary")
    return tokenizer


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A case that is marked `gpu` is for a device alone: Triton's interpreter multiplies bfloat16 wrongly."""
    wrong = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and item.get_closest_marker("gpu") is not None
        and hasattr(item, "callspec")
        and "interpreter" in item.callspec.params.values()
    ]
    items[:] = [item for item in items if item not in wrong]
    config.hook.pytest_deselected(items=wrong)
