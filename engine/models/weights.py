"""Where the weights of a file go: names of a format -> slots, which are parameters or slices of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from gguf import GGMLQuantizationType
from torch import Tensor

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import Decoder
from dayshift.types import DayshiftError

Part = Literal["q", "k", "v", "gate", "up"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter of `Decoder` (of a layer: without its prefix), or a part of a fused one."""

    parameter: str
    part: Part | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """A weight as a file holds it: values of any float dtype, or, quantised, uint8 (..., bytes of a row)."""

    rows: Tensor
    quant_type: GGMLQuantizationType | None = None


class WeightSource(Protocol):
    """The weights of one model on disk."""

    origin: str
    """Names the file or folder in errors."""

    names: WeightNames

    quant_types: Mapping[str, GGMLQuantizationType]
    """Of the weights that are quantised."""

    def weights(self) -> Iterator[tuple[str, StoredWeight]]:
        """All weights by name, in the order of our rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNames:
    """What a format calls the weights. `{layer}` and `{expert}` in a name stand for numbers."""

    top: Mapping[str, Slot]
    layer_prefix: str
    layer: Mapping[str, Slot]

    def slots(self, model: Decoder) -> dict[str, Slot]:
        """The slot of every weight that a file of `model` must hold, by the file's name for it."""
        parameters = {name for name, _ in model.named_parameters()}
        slots = {name: slot for name, slot in self.top.items() if slot.parameter in parameters}
        for index in range(model.config.num_layers):
            for name, slot in self.layer.items():
                parameter = f"layers.{index}.{slot.parameter}"
                if parameter not in parameters:
                    continue
                full_name = self.layer_prefix.format(layer=index) + name
                if "{expert}" not in name:
                    slots[full_name] = replace(slot, parameter=parameter)
                    continue
                assert model.config.moe is not None
                for expert in range(model.config.moe.num_experts):
                    slots[full_name.format(expert=expert)] = replace(slot, parameter=parameter, expert=expert)
        return slots


def slot_view(parameter: Tensor, slot: Slot, config: ModelConfig) -> Tensor:
    """The part of a parameter (or of its shape, on the `meta` device) that a slot stands for."""
    if slot.expert is not None:
        parameter = parameter[slot.expert]
    if slot.part is None:
        return parameter
    rows_dim = parameter.dim() - (1 if slot.parameter.endswith("bias") else 2)
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    half = parameter.shape[rows_dim] // 2  # of gate and up
    start, size = {
        "q": (0, q_size),
        "k": (q_size, kv_size),
        "v": (q_size + kv_size, kv_size),
        "gate": (0, half),
        "up": (half, half),
    }[slot.part]
    return parameter.narrow(rows_dim, start, size)


class ExpectedWeights:
    """The weights that a file must hold for a model, each exactly once.

    Slots and shapes are those of `model` now; its layers may be replaced afterwards. Of a model that is a
    part of one, files have the whole.
    """

    def __init__(self, model: Decoder, source: WeightSource) -> None:
        self.slots = source.names.slots(model)
        parameters = dict(model.named_parameters())
        self.shapes = {
            name: model.shard.whole_shape(
                slot.parameter, tuple(slot_view(parameters[slot.parameter].data, slot, model.config).shape)
            )
            for name, slot in self.slots.items()
        }
        self._missing = set(self.slots)
        self._origin = source.origin
        self._model_type = model.config.model_type

    def take(self, name: str, shape: tuple[int, ...]) -> Slot:
        """The slot of a weight that has come.

        Raises DayshiftError when it is not expected, comes twice or has a wrong shape.
        """
        if name not in self._missing:
            raise DayshiftError(f"{self._origin}: unexpected weight {name} for model_type {self._model_type}")
        if shape != self.shapes[name]:
            raise DayshiftError(
                f"{self._origin}: {name} has shape {shape}, the configuration implies {self.shapes[name]}"
            )
        self._missing.remove(name)
        return self.slots[name]

    def check_complete(self) -> None:
        """Raise DayshiftError unless every weight has come."""
        if self._missing:
            raise DayshiftError(
                f"{self._origin} lacks {len(self._missing)} weights, {min(self._missing)} among them"
            )
