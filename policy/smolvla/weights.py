"""Weights from a lerobot checkpoint into a `SmolVLA`.

Every parameter of ours says which checkpoint tensors it is made of, one after the other (projections that
read the same input are fused), so a missing, an unknown and a misshapen tensor all come out.

The weights of a norm are multiplied into those of the product that reads it, before anything is rounded, and
are ones afterwards: a norm is then a number for each row (`row_norm.py`).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dayshift.policy.smolvla.config import SmolVLAConfig
from dayshift.policy.smolvla.model import ImageTokens, SmolVLA
from dayshift.types import DayshiftError

WEIGHTS_FILE = "model.safetensors"

_VLM = "model.vlm_with_expert.vlm."
_VISION = f"{_VLM}model.vision_model."
_TEXT = f"{_VLM}model.text_model."
_ROOTS = {  # our module -> the checkpoint's; the first that fits
    "vision.layers.": f"{_VISION}encoder.layers.",
    "vision.": _VISION,
    "connector.": f"{_VLM}model.connector.modality_projection.",
    "text.": _TEXT,
    "expert.": "model.vlm_with_expert.lm_expert.",
    "": "model.",
}
_PARTS = {  # our leaf module -> the checkpoint's; others keep their name
    "patch_embedding": ("embeddings.patch_embedding",),
    "position_embedding": ("embeddings.position_embedding",),
    "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "kv_proj": ("self_attn.k_proj", "self_attn.v_proj"),
    "q_proj": ("self_attn.q_proj",),
    "k_proj": ("self_attn.k_proj",),
    "v_proj": ("self_attn.v_proj",),
    "o_proj": ("self_attn.o_proj",),
    "out_proj": ("self_attn.out_proj",),
    "fc1": ("mlp.fc1",),
    "fc2": ("mlp.fc2",),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_NORMS = {  # a product's weights in a layer -> those of the norm that it reads
    "qkv_proj.weight": "input_layernorm.weight",
    "kv_proj.weight": "input_layernorm.weight",
    "q_proj.weight": "input_layernorm.weight",
    "mlp.gate_up_proj.weight": "post_attention_layernorm.weight",
}
_LM_HEAD, _EMBEDDING = f"{_VLM}lm_head.weight", f"{_TEXT}embed_tokens.weight"


def load_model(
    checkpoint: Path,
    config: SmolVLAConfig,
    *,
    max_text_length: int,
    num_steps: int,
    image_tokens: ImageTokens | None,
    dtype: torch.dtype,
    device: torch.device,
) -> SmolVLA:
    """Build the model of `checkpoint` on `device`. Raises DayshiftError when the weights do not fit."""
    with torch.device("meta"):
        model = SmolVLA(config, max_text_length, num_steps, image_tokens)
    path = checkpoint / WEIGHTS_FILE
    if not path.is_file():
        raise DayshiftError(f"{checkpoint} has no {WEIGHTS_FILE}")
    try:
        weights = _read_weights(path, model, dtype, device)
    except SafetensorError as error:
        raise DayshiftError(f"{path} is not a readable safetensors file: {error}") from error
    model.load_state_dict(weights, assign=True)
    return model.to(device).eval().requires_grad_(False)


def checkpoint_names(parameter: str) -> tuple[str, ...]:
    """Checkpoint tensors that a parameter of ours is made of, in the order of its rows."""
    *path, leaf, kind = parameter.split(".")
    module = ".".join((*path, ""))
    ours = next(root for root in _ROOTS if module.startswith(root))
    theirs = _ROOTS[ours] + module.removeprefix(ours)
    return tuple(f"{theirs}{part}.{kind}" for part in _PARTS.get(leaf, (leaf,)))


def _read_weights(path: Path, model: SmolVLA, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    sources = {name: checkpoint_names(name) for name, _ in model.named_parameters()}
    with safe_open(path, framework="pt", device=str(device)) as file:
        present = set(file.keys())
        if _EMBEDDING not in present and _LM_HEAD in present:
            # Of tied weights safetensors keeps the alphabetically first name only.
            sources["text.embed_tokens.weight"] = (_LM_HEAD,)
        wanted = {name for names in sources.values() for name in names}
        unknown = {name for name in present - wanted if not _is_unused(name, model)}
        for kind, names in (("lacks", wanted - present), ("holds unknown", unknown)):
            if names:
                raise DayshiftError(f"{path} {kind} {len(names)} weights, {min(names)} among them")
        weights: dict[str, Tensor] = {}
        for name, parameter in model.named_parameters():
            parts = [file.get_tensor(part) for part in sources[name]]
            shapes = [tuple(part.shape) for part in parts]
            rows = sum(len(part) for part in parts)
            if any((rows, *shape[1:]) != parameter.shape for shape in shapes):
                raise DayshiftError(
                    f"{path}: {' + '.join(sources[name])} has shape {' + '.join(map(str, shapes))}, "
                    f"config.json implies {tuple(parameter.shape)}"
                )
            weights[name] = torch.cat(parts)
    for name, norm in _norms_of(weights).items():
        weights[name] = weights[name].float() * weights[norm].float()
    for norm in set(_norms_of(weights).values()):
        weights[norm] = torch.ones_like(weights[norm])
    return {name: whole.to(dtype) for name, whole in weights.items()}


def _norms_of(weights: dict[str, Tensor]) -> dict[str, str]:
    """The products of text layers and expert that read a norm, and its weights."""
    layers = {name: re.fullmatch(r"((?:text|expert)\.layers\.\d+\.)(.+)", name) for name in weights}
    return {
        name: layer[1] + _NORMS[layer[2]]
        for name, layer in layers.items()
        if layer is not None and layer[2] in _NORMS
    }


def _is_unused(name: str, model: SmolVLA) -> bool:
    """Weights that no action depends on: the language head and what follows the last keys and values."""
    last = f"{_TEXT}layers.{model.config.num_text_layers - 1}."
    return name in (_LM_HEAD, f"{_TEXT}norm.weight") or name.startswith(last)
