"""Weights from safetensors, under the names that Hugging Face gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.weights import Slot, StoredWeight, WeightNames
from dayshift.engine.quant.mxfp4 import MXFP4, gguf_rows
from dayshift.types import DayshiftError

_TOP = {
    "model.embed_tokens.weight": Slot("embed.weight"),
    "model.norm.weight": Slot("norm"),
    "lm_head.weight": Slot("lm_head.weight"),
}
_LAYER = {
    "input_layernorm.weight": Slot("input_norm"),
    "post_attention_layernorm.weight": Slot("mlp_norm"),
    "self_attn.q_proj.weight": Slot("qkv_proj.weight", "q"),
    "self_attn.k_proj.weight": Slot("qkv_proj.weight", "k"),
    "self_attn.v_proj.weight": Slot("qkv_proj.weight", "v"),
    "self_attn.q_proj.bias": Slot("qkv_proj.bias", "q"),
    "self_attn.k_proj.bias": Slot("qkv_proj.bias", "k"),
    "self_attn.v_proj.bias": Slot("qkv_proj.bias", "v"),
    "self_attn.q_norm.weight": Slot("q_norm"),
    "self_attn.k_norm.weight": Slot("k_norm"),
    "self_attn.o_proj.weight": Slot("o_proj.weight"),
    "mlp.gate_proj.weight": Slot("mlp.gate_up_proj.weight", "gate"),
    "mlp.up_proj.weight": Slot("mlp.gate_up_proj.weight", "up"),
    "mlp.down_proj.weight": Slot("mlp.down_proj.weight"),
    "mlp.gate.weight": Slot("mlp.router.weight"),
    "mlp.experts.{expert}.gate_proj.weight": Slot("mlp.experts_gate_up", "gate"),
    "mlp.experts.{expert}.up_proj.weight": Slot("mlp.experts_gate_up", "up"),
    "mlp.experts.{expert}.down_proj.weight": Slot("mlp.experts_down"),
}
_EXPERTS = "mlp.experts."
_GPT_OSS = {name: slot for name, slot in _LAYER.items() if not name.startswith(("mlp.gate.", _EXPERTS))} | {
    "self_attn.o_proj.bias": Slot("o_proj.bias"),
    "self_attn.sinks": Slot("sinks"),
    "mlp.router.weight": Slot("mlp.router.weight"),
    "mlp.router.bias": Slot("mlp.router.bias"),
    "mlp.experts.gate_up_proj": Slot("mlp.experts_gate_up"),
    "mlp.experts.gate_up_proj_bias": Slot("mlp.experts_gate_up_bias"),
    "mlp.experts.down_proj": Slot("mlp.experts_down"),
    "mlp.experts.down_proj_bias": Slot("mlp.experts_down_bias"),
}
_GEMMA3 = _LAYER | {
    "post_attention_layernorm.weight": Slot("attention_output_norm"),
    "pre_feedforward_layernorm.weight": Slot("mlp_norm"),
    "post_feedforward_layernorm.weight": Slot("mlp_output_norm"),
}
_LAYERS = {"gpt_oss": _GPT_OSS, "gemma3_text": _GEMMA3}

# A Gemma 3 that sees: what transformers 4 and 5 put before the names of its language model.
_LANGUAGE_MODEL = {"language_model.model.": "model.", "model.language_model.": "model."}
_VISION = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
_BLOCKS, _SCALES = "_blocks", "_scales"


def safetensors_names(config: ModelConfig) -> WeightNames:
    """Hugging Face's names."""
    layer = _LAYERS.get(config.model_type, _LAYER)
    return WeightNames(top=_TOP, layer_prefix="model.layers.{layer}.", layer=layer)


class SafetensorsSource:
    """The weights of a folder's `.safetensors` files, see `WeightSource`.

    Raises DayshiftError for a folder without such files, or a file that is damaged.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.origin = f"model folder {folder}"
        self.names = safetensors_names(config)
        self._config = config
        self._paths = sorted(folder.glob("*.safetensors"))
        if not self._paths:
            raise DayshiftError(f"model folder {folder} has no .safetensors file")
        with ExitStack() as stack:
            names = [_plain_name(name) for name in _open(self._paths, stack)]
        self.quant_types: Mapping[str, GGMLQuantizationType] = {
            name.removesuffix(_BLOCKS): MXFP4 for name in names if name.endswith(_BLOCKS)
        }

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """All weights by name, in the order of our rows."""
        model_type = self._config.model_type
        with ExitStack() as stack:
            files = _open(self._paths, stack)
            for name, file in files.items():
                if name.startswith(_VISION) or name.endswith(_SCALES):
                    continue  # scales are read with their blocks
                plain = _plain_name(name)
                if plain == "lm_head.weight" and self._config.tie_word_embeddings:
                    continue  # tied, and written all the same
                if name.endswith(_BLOCKS):
                    plain = plain.removesuffix(_BLOCKS)
                    rows = _mxfp4_rows(files, name.removesuffix(_BLOCKS))
                    yield plain, StoredWeight(rows=_our_rows(rows, plain, model_type), quant_type=MXFP4)
                    continue
                rows = file.get_tensor(name)
                if model_type == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
                    rows = rows.transpose(1, 2)  # (experts, in, out) where all others are (out, in)
                yield plain, StoredWeight(rows=_our_rows(rows, plain, model_type))


def _open(paths: list[Path], stack: ExitStack) -> dict[str, Any]:
    """Name of a weight -> the open file that holds it."""
    files: dict[str, Any] = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except SafetensorError as error:
            raise DayshiftError(f"{path} is not a readable safetensors file: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _mxfp4_rows(files: dict[str, Any], name: str) -> Tensor:
    """The experts' matrices as a GGUF file holds them, (num_experts, rows, bytes of a row)."""
    if name + _SCALES not in files:
        raise DayshiftError(f"weight {name} has blocks but no scales")
    blocks, scales = (files[name + part].get_tensor(name + part) for part in (_BLOCKS, _SCALES))
    return gguf_rows(blocks, scales)


def _plain_name(name: str) -> str:
    for prefix, plain in _LANGUAGE_MODEL.items():
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def _our_rows(weight: Tensor, name: str, model_type: str) -> Tensor:
    """Rows in the order of our slots, and norms as factors."""
    if model_type == "gpt_oss" and name.endswith(("gate_up_proj", "gate_up_proj_bias")):
        # Rows of gate and up alternate: put all of gate before all of up.
        return torch.cat((weight[:, ::2], weight[:, 1::2]), dim=1)
    if model_type == "gemma3_text" and weight.dim() == 1:
        return 1.0 + weight.float()
    return weight
