"""Weights from a GGUF file, under the names that llama.cpp gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.gguf_config import ROPE_FACTORS
from dayshift.engine.models.gguf_file import GgufFile
from dayshift.engine.models.weights import Slot, StoredWeight, WeightNames
from dayshift.engine.quant.dequantize import BLOCK_TYPES, SUPPORTED_TYPES, dequantize
from dayshift.types import DayshiftError

_TOP = {
    "token_embd.weight": Slot("embed.weight"),
    "output_norm.weight": Slot("norm"),
    "output.weight": Slot("lm_head.weight"),
}
_LAYER = {
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
    "attn_sinks.weight": Slot("sinks"),
    "attn_output.weight": Slot("o_proj.weight"),
    "attn_output.bias": Slot("o_proj.bias"),
    "ffn_gate.weight": Slot("mlp.gate_up_proj.weight", "gate"),
    "ffn_up.weight": Slot("mlp.gate_up_proj.weight", "up"),
    "ffn_down.weight": Slot("mlp.down_proj.weight"),
    "ffn_gate_inp.weight": Slot("mlp.router.weight"),
    "ffn_gate_inp.bias": Slot("mlp.router.bias"),
    "ffn_gate_exps.weight": Slot("mlp.experts_gate_up", "gate"),
    "ffn_up_exps.weight": Slot("mlp.experts_gate_up", "up"),
    "ffn_down_exps.weight": Slot("mlp.experts_down"),
    "ffn_gate_exps.bias": Slot("mlp.experts_gate_up_bias", "gate"),
    "ffn_up_exps.bias": Slot("mlp.experts_gate_up_bias", "up"),
    "ffn_down_exps.bias": Slot("mlp.experts_down_bias"),
}
_LAYERS = {
    "gpt_oss": _LAYER | {"post_attention_norm.weight": Slot("mlp_norm")},
    "gemma3_text": _LAYER
    | {
        "post_attention_norm.weight": Slot("attention_output_norm"),
        "post_ffw_norm.weight": Slot("mlp_output_norm"),
    },
}
del _LAYERS["gpt_oss"]["ffn_norm.weight"]


def gguf_names(config: ModelConfig) -> WeightNames:
    """llama.cpp's names."""
    return WeightNames(top=_TOP, layer_prefix="blk.{layer}.", layer=_LAYERS.get(config.model_type, _LAYER))


class GgufSource:
    """The weights of a GGUF file, see `WeightSource`.

    Raises DayshiftError for a quantisation that is not supported.
    """

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self.origin = str(file.path)
        self.names = gguf_names(config)
        self.quant_types: Mapping[str, GGMLQuantizationType] = {
            name: tensor.quant_type
            for name, tensor in file.tensors.items()
            if tensor.quant_type in BLOCK_TYPES
        }
        self._file, self._config = file, config
        for name, tensor in file.tensors.items():
            if tensor.quant_type not in SUPPORTED_TYPES:
                raise DayshiftError(
                    f"{file.path}: {name} is quantised as {tensor.quant_type.name}; supported are "
                    f"{', '.join(quant_type.name for quant_type in SUPPORTED_TYPES)}"
                )

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """All weights by name, in the order of our rows."""
        for name, tensor in self._file.tensors.items():
            if name == ROPE_FACTORS:
                continue  # part of the configuration
            rows, quant_type = torch.from_numpy(tensor.raw), self.quant_types.get(name)
            if quant_type is None:
                rows = dequantize(rows, tensor.quant_type)
            if self._file.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
                rows = _halves_of_heads(rows, self._config)
            yield name, StoredWeight(rows=rows, quant_type=quant_type)


def _halves_of_heads(weight: Tensor, config: ModelConfig) -> Tensor:
    """llama.cpp rotates neighbouring rows of a head where we rotate its halves; put the rows back.

    (num_heads * head_dim, values or bytes of a row), for queries and keys of architecture llama only.
    """
    pairs = weight.view(-1, config.head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def pairs_of_heads(weight: Tensor, config: ModelConfig) -> Tensor:
    """The inverse of `_halves_of_heads`."""
    halves = weight.reshape(-1, 2, config.head_dim // 2, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
