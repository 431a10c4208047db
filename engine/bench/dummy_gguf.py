"""GGUF files of well-known shapes and quantisations without their weights: everything is there but the
bytes of the tensors, for which the file has a hole. Load them with `dummy` weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from tokenizers.pre_tokenizers import ByteLevel

from dayshift.engine.models.config import ModelConfig, MoeConfig, SlidingWindow, YarnScaling
from dayshift.engine.models.convert import add_field
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.gguf_fields import config_fields
from dayshift.engine.models.gguf_weights import gguf_names
from dayshift.engine.models.weights import slot_view
from dayshift.types import DayshiftError

Q = GGMLQuantizationType
Mix = Callable[[str, int, int], GGMLQuantizationType]
"""Name of a matrix ("token_embd", "ffn_down", ...), index of its layer, number of layers -> its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufShape:
    """A model, and how its matrices are quantised."""

    architecture: str
    config: ModelConfig
    mix: Mix


def q4_k_m(name: str, layer: int, num_layers: int) -> GGMLQuantizationType:
    """As llama.cpp's `llama_tensor_get_type` for Q4_K_M."""
    is_finer = name in ("attn_v", "ffn_down", "ffn_down_exps") and _uses_more_bits(layer, num_layers)
    return Q.Q6_K if is_finer or name == "output" else Q.Q4_K


def q3_k_m(name: str, layer: int, num_layers: int) -> GGMLQuantizationType:
    """The same for Q3_K_M."""
    match name:
        case "output":
            return Q.Q6_K
        case "attn_v":
            return Q.Q5_K if layer < 2 else Q.Q4_K
        case "ffn_down" | "ffn_down_exps":
            return Q.Q5_K if layer < num_layers // 16 else Q.Q4_K
        case "attn_output":
            return Q.Q4_K
        case _:
            return Q.Q3_K


def mxfp4(name: str, _layer: int, _num_layers: int) -> GGMLQuantizationType:
    """gpt-oss as it is published: experts in MXFP4, all other matrices in Q8_0."""
    return Q.MXFP4 if name.endswith("_exps") else Q.Q8_0


def _uses_more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


_QWEN3 = ModelConfig(
    model_type="qwen3",
    vocab_size=151_936,
    hidden_size=5120,
    intermediate_size=25_600,
    num_layers=64,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    max_positions=40_960,
    rms_norm_eps=1e-6,
    rope_theta=1_000_000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    has_qkv_bias=False,
    has_qk_norm=True,
)
_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    moe=MoeConfig(num_experts=128, num_experts_per_token=8, intermediate_size=768, is_top_k_normalized=True),
)
_LLAMA_3B = ModelConfig(
    model_type="llama",
    vocab_size=128_256,
    hidden_size=3072,
    intermediate_size=8192,
    num_layers=28,
    num_heads=24,
    num_kv_heads=8,
    head_dim=128,
    max_positions=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,  # its rotation takes as long without Llama 3's
    tie_word_embeddings=True,
    has_qkv_bias=False,
    has_qk_norm=False,
)
_GPT_OSS = ModelConfig(
    model_type="gpt_oss",
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_positions=131_072,
    rms_norm_eps=1e-5,
    rope_theta=150_000.0,
    rope_scaling=YarnScaling(
        factor=32.0,
        beta_fast=32.0,
        beta_slow=1.0,
        original_max_positions=4096,
        is_truncated=False,
        attention_factor=1.3466,
    ),
    tie_word_embeddings=False,
    has_qkv_bias=True,
    has_qk_norm=False,
    moe=MoeConfig(
        num_experts=32,
        num_experts_per_token=4,
        intermediate_size=2880,
        is_top_k_normalized=True,
        has_bias=True,
    ),
    activation="clamped_swiglu",
    sliding_window=SlidingWindow(size=128, is_sliding=(True, False) * 12),
    has_o_bias=True,
    has_sinks=True,
)

SHAPES = {
    "qwen3-30b-a3b-q3_k_m": GgufShape(architecture="qwen3moe", config=_QWEN3_MOE, mix=q3_k_m),
    "qwen3-32b-q4_k_m": GgufShape(architecture="qwen3", config=_QWEN3, mix=q4_k_m),
    "llama-3.2-3b-q4_k_m": GgufShape(architecture="llama", config=_LLAMA_3B, mix=q4_k_m),
    "gpt-oss-20b-mxfp4": GgufShape(architecture="gpt-oss", config=_GPT_OSS, mix=mxfp4),
}


def write_gguf_shape(shape: GgufShape, path: Path) -> Path:
    """Write the shape's file. Its size is the true one, the space that it takes on disk some KiB."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    for key, value in (config_fields(shape.config, shape.architecture) | _tokenizer_fields()).items():
        add_field(writer, key, value)
    with torch.device("meta"):
        model = Decoder(shape.config, num_positions=1)
    parameters = dict(model.named_parameters())
    num_bytes = 0
    for name, slot in gguf_names(shape.config).slots(model).items():
        size = tuple(slot_view(parameters[slot.parameter].data, slot, shape.config).shape)
        quant_type = _type_of(shape, name, size)
        block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
        of_tensor = size[-1] // block_size * block_bytes * int(np.prod(size[:-1]))
        writer.add_tensor_info(name, size, np.dtype(np.float32), of_tensor, raw_dtype=quant_type)
        num_bytes += gguf.GGUFWriter.ggml_pad(of_tensor, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        header = gguf.GGUFWriter.ggml_pad(path.stat().st_size, writer.data_alignment)
        file.truncate(header + num_bytes)
    return path


def shape_named(name: str) -> GgufShape:
    """Raises DayshiftError for a name that is not in `SHAPES`."""
    if name not in SHAPES:
        raise DayshiftError(f"shape {name} is unknown; allowed: {', '.join(SHAPES)}")
    return SHAPES[name]


def _type_of(shape: GgufShape, name: str, size: tuple[int, ...]) -> GGMLQuantizationType:
    """Norms, biases, sinks and routers are not quantised; an embedding that is the head is as a head."""
    parts = name.split(".")
    matrix = parts[-2]
    if len(size) == 1 or parts[-1] == "bias" or matrix == "ffn_gate_inp":
        return Q.F32
    if matrix == "token_embd" and shape.config.tie_word_embeddings:
        matrix = "output"
    layer = int(parts[1]) if parts[0] == "blk" else 0
    return shape.mix(matrix, layer, shape.config.num_layers)


def _tokenizer_fields() -> dict[str, object]:
    """The 256 bytes, a merge, and an end: all other ids have no text."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, letters[0] + letters[1], "<eos>"]
    kinds = [TokenType.NORMAL] * (len(tokens) - 1) + [TokenType.CONTROL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": [f"{letters[0]} {letters[1]}"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }
