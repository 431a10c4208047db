"""Weights from safetensors, under the names that Hugging Face gives them."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.weights import Slot, WeightFiller, WeightNames
from dayshift.types import DayshiftError

_NAMES = WeightNames(
    top={
        "model.embed_tokens.weight": Slot("embed.weight"),
        "model.norm.weight": Slot("norm"),
        "lm_head.weight": Slot("lm_head.weight"),
    },
    layer_prefix="model.layers.{layer}.",
    layer={
        "input_layernorm.weight": Slot("input_norm"),
        "post_attention_layernorm.weight": Slot("post_attention_norm"),
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
    },
)


def load_safetensors(model: Decoder, folder: Path) -> None:
    """Fill `model` from the `.safetensors` files of `folder`.

    Raises DayshiftError for a file that is damaged, and weights that are missing or not expected.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DayshiftError(f"model folder {folder} has no .safetensors file")
    filler = WeightFiller(model, _NAMES, f"model folder {folder}")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    if name == "lm_head.weight" and model.lm_head is None:
                        continue  # tied, and written all the same
                    filler.fill(name, file.get_tensor(name))
        except SafetensorError as error:
            raise DayshiftError(f"{path} is not a readable safetensors file: {error}") from error
    filler.check_complete()
