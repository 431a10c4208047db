"""Weights from safetensors (Hugging Face names) into a `Decoder`, and a model's identity."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dayshift.engine.config import LoadFormat
from dayshift.engine.models.config import ModelConfig, load_model_config
from dayshift.engine.models.decoder import Decoder
from dayshift.types import DayshiftError

# Hugging Face name of a layer's weight -> (our parameter, which part of a fused one)
_LAYER_WEIGHTS: dict[str, tuple[str, str | None]] = {
    "input_layernorm.weight": ("input_norm", None),
    "post_attention_layernorm.weight": ("post_attention_norm", None),
    "self_attn.q_proj.weight": ("qkv_proj.weight", "q"),
    "self_attn.k_proj.weight": ("qkv_proj.weight", "k"),
    "self_attn.v_proj.weight": ("qkv_proj.weight", "v"),
    "self_attn.q_proj.bias": ("qkv_proj.bias", "q"),
    "self_attn.k_proj.bias": ("qkv_proj.bias", "k"),
    "self_attn.v_proj.bias": ("qkv_proj.bias", "v"),
    "self_attn.q_norm.weight": ("q_norm", None),
    "self_attn.k_norm.weight": ("k_norm", None),
    "self_attn.o_proj.weight": ("o_proj.weight", None),
    "mlp.gate_proj.weight": ("gate_up_proj.weight", "gate"),
    "mlp.up_proj.weight": ("gate_up_proj.weight", "up"),
    "mlp.down_proj.weight": ("down_proj.weight", None),
}
_TOP_WEIGHTS = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm",
    "lm_head.weight": "lm_head.weight",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    load_format: LoadFormat,
    seed: int,
) -> Decoder:
    """Build the decoder of `folder` on `device`, its position table `num_positions` long.

    `load_format` "dummy" draws random weights of the exact shape, for benchmarks.
    """
    config = load_model_config(folder)
    with torch.device("meta"):
        model = Decoder(config, num_positions)
    model = model.to(dtype=dtype).to_empty(device=device)
    model.fill_position_table()
    if load_format == "dummy":
        _fill_random(model, seed)
    else:
        _load_safetensors(model, folder, config)
    return model.eval().requires_grad_(False)


def model_identity(folder: Path, *, dtype: torch.dtype) -> bytes:
    """SHA-256 over what decides whether stored KV may be used again: configuration, tokenizer,
    chat template, KV dtype and weights.

    Of a weight file the size, the header and 64 KiB from each of 16 places are hashed: reading
    60 GB at every start would cost more than the KV saves.
    """
    digest = hashlib.sha256(str(dtype).encode())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        path = folder / name
        digest.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            for part in range(16):
                file.seek(part * max(size - 65_536, 0) // 15)
                digest.update(file.read(65_536))
    return digest.digest()


def _load_safetensors(model: Decoder, folder: Path, config: ModelConfig) -> None:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DayshiftError(f"model folder {folder} has no .safetensors file")
    parameters = dict(model.named_parameters())
    missing = _expected_names(parameters, config)
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    if name == "lm_head.weight" and config.tie_word_embeddings:
                        continue
                    target = _target(name, parameters, config)
                    tensor = file.get_tensor(name)
                    if target.shape != tensor.shape:
                        raise DayshiftError(
                            f"{path.name}: {name} has shape {tuple(tensor.shape)}, "
                            f"config.json implies {tuple(target.shape)}"
                        )
                    target.copy_(tensor)
                    missing.discard(name)
        except SafetensorError as error:
            raise DayshiftError(f"{path} is not a readable safetensors file: {error}") from error
    if missing:
        raise DayshiftError(f"model folder {folder} lacks {len(missing)} weights, {min(missing)} among them")


def _expected_names(parameters: dict[str, nn.Parameter], config: ModelConfig) -> set[str]:
    names = {name for name, ours in _TOP_WEIGHTS.items() if ours in parameters}
    for index in range(config.num_layers):
        names |= {
            f"model.layers.{index}.{name}"
            for name, (ours, _) in _LAYER_WEIGHTS.items()
            if f"layers.{index}.{ours}" in parameters
        }
    return names


def _target(name: str, parameters: dict[str, nn.Parameter], config: ModelConfig) -> Tensor:
    """The (slice of the) parameter that a Hugging Face weight is copied into."""
    if name in _TOP_WEIGHTS:
        return parameters[_TOP_WEIGHTS[name]].data
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _LAYER_WEIGHTS:
        raise DayshiftError(f"unexpected weight {name} for model_type {config.model_type}")
    ours, part = _LAYER_WEIGHTS[match[2]]
    parameter = parameters.get(f"layers.{match[1]}.{ours}")
    if parameter is None:
        raise DayshiftError(f"unexpected weight {name} for model_type {config.model_type}")
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    start, size = {
        None: (0, parameter.shape[0]),
        "q": (0, q_size),
        "k": (q_size, kv_size),
        "v": (q_size + kv_size, kv_size),
        "gate": (0, config.intermediate_size),
        "up": (config.intermediate_size, config.intermediate_size),
    }[part]
    return parameter.data[start : start + size]


def _fill_random(model: Decoder, seed: int) -> None:
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
