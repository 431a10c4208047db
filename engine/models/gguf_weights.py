"""Weights from a GGUF file, dequantised as they are loaded."""

from __future__ import annotations

import torch
from torch import Tensor

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.gguf_config import ROPE_FACTORS
from dayshift.engine.models.gguf_file import GgufFile
from dayshift.engine.models.weights import Slot, WeightFiller, WeightNames
from dayshift.engine.quant.dequantize import SUPPORTED_TYPES, dequantize
from dayshift.types import DayshiftError

_NAMES = WeightNames(
    top={
        "token_embd.weight": Slot("embed.weight"),
        "output_norm.weight": Slot("norm"),
        "output.weight": Slot("lm_head.weight"),
    },
    layer_prefix="blk.{layer}.",
    layer={
        "attn_norm.weight": Slot("input_norm"),
        "ffn_norm.weight": Slot("mlp_norm"),
        "attn_q.weight": Slot("qkv_proj.weight", "q"),
        "attn_k.weight": Slot("qkv_proj.weight", "k"),
        "attn_v.weight": Slot("qkv_proj.weight", "v"),
        "attn_q.bias": Slot("qkv_proj.bias", "q"),
        "attn_k.bias": Slot("qkv_proj.bias", "k"),
        "attn_v.bias": Slot("qkv_proj.bias", "v"),
        "attn_q_norm.weight": Slot("q_norm"),
        "attn_k_norm.weight": Slot("k_norm"),
        "attn_output.weight": Slot("o_proj.weight"),
        "ffn_gate.weight": Slot("mlp.gate_up_proj.weight", "gate"),
        "ffn_up.weight": Slot("mlp.gate_up_proj.weight", "up"),
        "ffn_down.weight": Slot("mlp.down_proj.weight"),
        "ffn_gate_inp.weight": Slot("mlp.router.weight"),
        "ffn_gate_exps.weight": Slot("mlp.experts_gate_up", "gate"),
        "ffn_up_exps.weight": Slot("mlp.experts_gate_up", "up"),
        "ffn_down_exps.weight": Slot("mlp.experts_down"),
    },
)


def load_gguf(model: Decoder, file: GgufFile) -> None:
    """Fill `model`; the weights are unpacked on its device.

    Raises DayshiftError for a quantisation that is not supported, and weights that are missing or
    not expected.
    """
    filler = WeightFiller(model, _NAMES, str(file.path))
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue  # part of the configuration
        if tensor.quant_type not in SUPPORTED_TYPES:
            raise DayshiftError(
                f"{file.path}: {name} is quantised as {tensor.quant_type.name}; supported are "
                f"{', '.join(quant_type.name for quant_type in SUPPORTED_TYPES)}"
            )
        raw = torch.from_numpy(tensor.raw).to(model.embed.weight.device)
        weight = dequantize(raw, tensor.quant_type)
        if file.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _halves_of_heads(weight, model.config)
        filler.fill(name, weight)
    filler.check_complete()


def _halves_of_heads(weight: Tensor, config: ModelConfig) -> Tensor:
    """llama.cpp rotates neighbouring rows of a head where we rotate its halves; put the rows back.

    (num_heads * head_dim, hidden), for queries and keys of architecture llama only.
    """
    pairs = weight.view(-1, config.head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)
