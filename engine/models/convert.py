"""Writes a model in another format: a GGUF file, or a Hugging Face folder in another dtype.

The model is loaded whole, in float32, and written from there. Formats that round (all but F32) round
what they are given: converting a quantised file to another quantised type loses twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.formats import is_gguf, load_model_config
from dayshift.engine.models.gguf_config import MODEL_TYPES
from dayshift.engine.models.gguf_fields import config_fields, tokenizer_fields
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.models.gguf_tokenizer import read_gguf_tokenizer
from dayshift.engine.models.gguf_weights import gguf_names, pairs_of_heads
from dayshift.engine.models.hugging_face_config import config_json
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.models.safetensors_weights import safetensors_names
from dayshift.engine.models.weights import WeightNames, slot_view
from dayshift.types import DayshiftError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
GGUF_TYPES = (*DTYPES, "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4")


def convert_model(model: Path, out: Path, weight_type: str) -> None:
    """Write `model` to `out`, a `.gguf` file or a folder.

    Raises DayshiftError for a type that the format does not have or that cannot be written, and when
    `out` exists.
    """
    to_gguf = out.suffix == ".gguf"
    allowed = GGUF_TYPES if to_gguf else tuple(DTYPES)
    if weight_type not in allowed:
        what = "GGUF files" if to_gguf else "folders"
        raise DayshiftError(f"type {weight_type} cannot be written to {what}; allowed: {', '.join(allowed)}")
    if out.exists():
        raise DayshiftError(f"{out} exists already")
    config = load_model_config(model)
    if not to_gguf and config.model_type == "gpt_oss":
        raise DayshiftError(f"{model}: gpt-oss can be written to a GGUF file only")
    decoder = load_decoder(
        model,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_positions=1,
        load_format="auto",
        seed=0,
        keep_quantized=False,
    )
    write = _write_gguf if to_gguf else _write_folder
    write(decoder, model, out, weight_type)


def _weights(model: Decoder, names: WeightNames) -> Iterator[tuple[str, Tensor]]:
    """Every weight under a format's name."""
    parameters = dict(model.named_parameters())
    for name, slot in names.slots(model).items():
        yield name, slot_view(parameters[slot.parameter].data, slot, model.config)


def _write_gguf(decoder: Decoder, model: Path, out: Path, weight_type: str) -> None:
    config, quant_type = decoder.config, GGMLQuantizationType[weight_type]
    architecture = {model_type: name for name, model_type in MODEL_TYPES.items()}[config.model_type]
    writer = gguf.GGUFWriter(out, architecture)
    for key, value in (config_fields(config, architecture) | tokenizer_fields(model)).items():
        add_field(writer, key, value)
    for name, weight in _weights(decoder, gguf_names(config)):
        if architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = pairs_of_heads(weight, config)
        _add_weight(writer, name, weight.contiguous().numpy(), quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_weight(writer: gguf.GGUFWriter, name: str, weight: np.ndarray, wanted: GGMLQuantizationType) -> None:
    """Norms, biases, sinks and routers stay float32, as llama.cpp's converter writes them."""
    if weight.ndim == 1 or name.endswith((".bias", "ffn_gate_inp.weight")):
        writer.add_tensor(name, weight)
        return
    block_size, _ = gguf.GGML_QUANT_SIZES[wanted]
    if weight.shape[-1] % block_size:
        raise DayshiftError(
            f"{name} has rows of {weight.shape[-1]} weights, {wanted.name} has blocks of {block_size}"
        )
    writer.add_tensor(name, gguf.quantize(weight, wanted), raw_dtype=wanted)


def add_field(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata of the value's type; numbers are of 32 bits."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _write_folder(decoder: Decoder, model: Path, out: Path, weight_type: str) -> None:
    config, dtype = decoder.config, DTYPES[weight_type]
    weights = {
        name: _as_stored(weight, config).to(dtype).contiguous()
        for name, weight in _weights(decoder, safetensors_names(config))
    }
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    if is_gguf(model):
        _write_tokenizer(model, out)
        fields = config_json(config)
    else:
        for path in (*model.glob("*.json"), *model.glob("*.jinja")):
            if not path.name.endswith(".index.json"):
                shutil.copy(path, out)
        fields = json.loads((out / "config.json").read_text(encoding="utf-8"))
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")


def _as_stored(weight: Tensor, config: ModelConfig) -> Tensor:
    return weight - 1.0 if config.model_type == "gemma3_text" and weight.dim() == 1 else weight


def _write_tokenizer(model: Path, out: Path) -> None:
    parts = read_gguf_tokenizer(open_gguf(model))
    parts.tokenizer.save(str(out / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **parts.special_tokens}
    if parts.chat_template is not None:
        fields["chat_template"] = parts.chat_template
    (out / "tokenizer_config.json").write_text(json.dumps(fields, indent=1), encoding="utf-8")
    eos = {"eos_token_id": sorted(parts.eos_token_ids)}
    (out / "generation_config.json").write_text(json.dumps(eos), encoding="utf-8")
