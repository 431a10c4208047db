"""Builds a `Decoder` with its weights, and a model's identity."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from dayshift.engine.config import LoadFormat
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.formats import is_gguf, load_model_config
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.models.gguf_weights import load_gguf
from dayshift.engine.models.safetensors_weights import load_safetensors


def load_decoder(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    load_format: LoadFormat,
    seed: int,
) -> Decoder:
    """Build the decoder of a model folder or GGUF file on `device`, its position table
    `num_positions` long.

    `load_format` "dummy" draws random weights of the exact shape, for benchmarks.
    """
    config = load_model_config(path)
    with torch.device("meta"):
        model = Decoder(config, num_positions)
    model = model.to(dtype=dtype).to_empty(device=device)
    _keep_norms_wide(model)
    model.fill_position_table()
    if load_format == "dummy":
        _fill_random(model, seed)
    elif is_gguf(path):
        load_gguf(model, open_gguf(path))
    else:
        load_safetensors(model, path)
    return model.eval().requires_grad_(False)


def model_identity(path: Path, *, dtype: torch.dtype) -> bytes:
    """SHA-256 over what decides whether stored KV may be used again: configuration, tokenizer,
    chat template, KV dtype and weights.

    Of a weight file the size, the header and 64 KiB from each of 16 places are hashed: reading
    60 GB at every start would cost more than the KV saves.
    """
    digest = hashlib.sha256(str(dtype).encode())
    if is_gguf(path):
        with path.open("rb") as file:
            digest.update(file.read(open_gguf(path).metadata_bytes))
        digest.update(_sample(path))
        return digest.digest()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        part = path / name
        digest.update(name.encode() + (part.read_bytes() if part.is_file() else b""))
    for weights in sorted(path.glob("*.safetensors")):
        digest.update(weights.name.encode() + _sample(weights))
    return digest.digest()


def _sample(path: Path) -> bytes:
    """SHA-256 of a file's size and of 64 KiB from each of 16 places, its start and end among them."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for part in range(16):
            file.seek(part * max(size - 65_536, 0) // 15)
            digest.update(file.read(65_536))
    return digest.digest()


def _keep_norms_wide(model: Decoder) -> None:
    """Factors of norms in float32, as the kernels compute: Gemma's are 1 + w, GGUF files' are float32."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.data = parameter.data.float()


def _fill_random(model: Decoder, seed: int) -> None:
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.data.zero_()
        elif parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    if model.config.moe is not None:
        # As in trained models, tokens stay distinct through all layers; otherwise the routers would
        # send them all to the same experts.
        model.embed.weight.data.mul_(50.0)
