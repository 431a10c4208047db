"""Which models compute on a GPU while something runs: seen from the models' own calls, told by nobody."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.quantized import PackedParts, QuantizedLinear, QuantizedMoe
from dayshift.engine.models.seen_on_gpu import FALLBACK, SeenModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def watched_models(device_type: str = "cuda") -> Iterator[set[SeenModel]]:
    """The models that have been called on such devices since the context began; the set grows as they are."""
    seen: set[SeenModel] = set()
    known: set[int] = set()  # ids of models, each of which is looked at once

    def note(module: nn.Module, _: Any) -> None:
        if id(module) in known or not (isinstance(module, Decoder) or _is_pretrained(module)):
            return
        known.add(id(module))
        if next(module.parameters()).device.type == device_type:
            seen.add(seen_model(module))

    hook = register_module_forward_pre_hook(note)
    try:
        yield seen
    finally:
        hook.remove()


def seen_model(model: Decoder | PreTrainedModel) -> SeenModel:
    """What a record says of a model."""
    if not isinstance(model, Decoder):
        return SeenModel(model_type=model.config.model_type, weights=_name(model.dtype), path=FALLBACK)
    types = {matrix.quant_type.name for parts in _packed(model) for matrix in parts.matrices}
    return SeenModel(
        model_type=model.config.model_type,
        weights=", ".join(sorted(types)) or _name(model.embed.weight.dtype),
    )


def _is_pretrained(module: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether it is a whole model of transformers, if that has been imported."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(module, library.PreTrainedModel)


def _packed(model: Decoder) -> Iterator[PackedParts]:
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            yield module.parts
        elif isinstance(module, QuantizedMoe):
            yield module.gate_up
            yield module.down


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
