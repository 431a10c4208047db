"""Builds a `Decoder` with its weights, and a model's identity."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor, nn

from dayshift.engine.config import LoadFormat
from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.device_copy import on_device
from dayshift.engine.models.formats import is_gguf, load_model_config
from dayshift.engine.models.gguf_file import gguf_parts, open_gguf
from dayshift.engine.models.gguf_weights import GgufSource
from dayshift.engine.models.quantized import QuantizedHead, put_packed, replace_by_quantized
from dayshift.engine.models.quantized_layer import attend_in_one_launch
from dayshift.engine.models.safetensors_weights import SafetensorsSource
from dayshift.engine.models.shard import WHOLE, Shard
from dayshift.engine.models.weights import ExpectedWeights, Slot, WeightSource, slot_view
from dayshift.engine.quant.dequantize import dequantize
from dayshift.engine.quant.packed import PackedMatrix, pack, packed_bytes
from dayshift.engine.quant.random_packed import random_packed
from dayshift.types import DayshiftError


def load_decoder(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_positions: int,
    load_format: LoadFormat,
    seed: int,
    keep_quantized: bool | None = None,
    shard: Shard = WHOLE,
    decoder_type: type[Decoder] = Decoder,
) -> Decoder:
    """Build the decoder of a model folder or GGUF file on `device`, its position table
    `num_positions` long.

    `load_format` "dummy" draws random weights of the exact shape, for benchmarks; of a GGUF file they are
    quantised as its are.
    `keep_quantized`: quantised matrices stay so in memory and are unpacked as they are multiplied;
    None: on a GPU, where reading them bounds decoding. The embedding is always unpacked.
    `shard`: the part of the model that is built and read.
    `decoder_type`: what is built, with the parameters of `Decoder`.

    Raises DayshiftError for files that do not fit the model, and for quantised matrices that are to be kept
    and split.
    """
    whole = load_model_config(path)
    config = shard.of(whole)
    with torch.device("meta"):
        model = decoder_type(config, num_positions, shard)
    is_kept = device.type == "cuda" if keep_quantized is None else keep_quantized
    if load_format == "dummy" and not (is_kept and is_gguf(path)):
        model = _materialize(model, dtype, device)
        _fill_random(model, seed)
        return model.eval().requires_grad_(False)
    source = _open_source(path, whole)
    expected = ExpectedWeights(model, source)
    packed = _replace_quantized(model, expected, source) if is_kept else set()
    if packed and shard.size > 1:
        raise DayshiftError(f"{path}: quantised weights are not split over GPUs; use tensor_parallel 1")
    model = _materialize(model, dtype, device)
    if load_format == "dummy":
        _fill_random(model, seed)
        _put_random_packed(model, expected, source, packed, seed)
        return _complete(model)
    parameters = dict(model.named_parameters())
    for (slot, quant_type), rows in on_device(_needed_rows(source, expected, shard), device):
        if slot.parameter in packed and quant_type is not None:
            put_packed(model, slot.parameter, slot.part, pack(rows, quant_type))
            continue
        weight = rows if quant_type is None else _cut(dequantize(rows, quant_type), slot, shard)
        if slot.parameter == "embed.weight" and is_kept and quant_type is not None:
            _tie_quantized_head(model, pack(rows, quant_type))
        slot_view(parameters[slot.parameter].data, slot, config).copy_(weight)
    expected.check_complete()
    return _complete(model)


def _complete(model: Decoder) -> Decoder:
    """The model with all of its weights; on a GPU with the layers that quantised weights allow."""
    if model.embed.weight.is_cuda:
        attend_in_one_launch(model)
    return model.eval().requires_grad_(False)


def _put_random_packed(
    model: Decoder, expected: ExpectedWeights, source: WeightSource, packed: set[str], seed: int
) -> None:
    """Random integers for every matrix of `packed` parameters, and of the head that an embedding is."""
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(seed)
    for name, slot in expected.slots.items():
        quant_type, shape = source.quant_types.get(name), expected.shapes[name]
        if quant_type is None:
            continue
        if slot.parameter in packed:
            put_packed(model, slot.parameter, slot.part, random_packed(quant_type, shape, generator))
        elif slot.parameter == "embed.weight":
            _tie_quantized_head(model, random_packed(quant_type, shape, generator))


def _needed_rows(
    source: WeightSource, expected: ExpectedWeights, shard: Shard
) -> Iterator[tuple[tuple[Slot, GGMLQuantizationType | None], Tensor]]:
    """Slot, quantisation and rows of every weight, as its file holds them. The shard's part of those that
    are not quantised. Raises DayshiftError as `ExpectedWeights.take`."""
    for name, stored in source.weights():
        shape = tuple(stored.rows.shape)
        if stored.quant_type is not None:
            block_size, block_bytes = GGML_QUANT_SIZES[stored.quant_type]
            shape = (*shape[:-1], shape[-1] // block_bytes * block_size)
        slot = expected.take(name, shape)
        rows = stored.rows if stored.quant_type is not None else _cut(stored.rows, slot, shard)
        yield (slot, stored.quant_type), rows


def _cut(weight: Tensor, slot: Slot, shard: Shard) -> Tensor:
    return shard.cut(slot.parameter, weight, is_fused=slot.part is None)


def gpu_weight_bytes(path: Path, itemsize: int) -> int:
    """Memory that a model's weights take on a GPU: quantised matrices packed, the embedding unpacked.

    Nothing is loaded. `itemsize`: bytes of an unpacked value.
    """
    config = load_model_config(path)
    with torch.device("meta"):
        model = Decoder(config, num_positions=1)
    source = _open_source(path, config)
    expected = ExpectedWeights(model, source)
    packed = _replace_quantized(model, expected, source)
    total = 0
    for name, slot in expected.slots.items():
        num_weights, quant_type = math.prod(expected.shapes[name]), source.quant_types.get(name)
        if slot.parameter in packed and quant_type is not None:
            total += packed_bytes(num_weights, quant_type)
            continue
        total += num_weights * itemsize
        if slot.parameter == "embed.weight" and config.tie_word_embeddings and quant_type is not None:
            total += packed_bytes(num_weights, quant_type)
    return total


def _open_source(path: Path, config: ModelConfig) -> WeightSource:
    return GgufSource(open_gguf(path), config) if is_gguf(path) else SafetensorsSource(path, config)


def _materialize(model: Decoder, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model with memory for its parameters, still unfilled."""
    # As `to_empty` does, which imports torch's compiler for a model on the `meta` device.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))
    _keep_norms_wide(model)
    model.fill_position_table()
    return model


def _replace_quantized(model: Decoder, expected: ExpectedWeights, source: WeightSource) -> set[str]:
    """Put layers for quantised weights where all of a layer's matrices are; their parameters' names."""
    # A layer's parameters: all matrices of a mixture, or the one of a linear layer.
    layers: dict[str, set[str]] = {}
    plain: set[str] = set()
    for name, slot in expected.slots.items():
        owner, _, own_name = slot.parameter.rpartition(".")
        if own_name in ("experts_gate_up", "experts_down") or slot.parameter.endswith(
            ("proj.weight", "head.weight")
        ):
            layers.setdefault(owner, set()).add(slot.parameter)
            if name not in source.quant_types:
                plain.add(owner)
    kept = set().union(*(names for owner, names in layers.items() if owner not in plain))
    for parameter in kept:
        replace_by_quantized(model, parameter)
    return kept


def _tie_quantized_head(model: Decoder, embedding: PackedMatrix) -> None:
    """Tokens are looked up in the unpacked embedding; a head tied to it reads the packed one."""
    if model.config.tie_word_embeddings:
        head = QuantizedHead("lm_head", bias=None)
        head.parts.put(None, embedding)
        model.lm_head = head


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
        for part in gguf_parts(path):
            digest.update(_sample(part))
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
