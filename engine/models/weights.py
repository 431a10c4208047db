"""Where the weights of a file go: names of a format -> slots, which are parameters or slices of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

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


class WeightFiller:
    """Copies the weights of one model into a decoder, each exactly once.

    `origin` names the file or folder in errors.
    """

    def __init__(self, model: Decoder, names: WeightNames, origin: str) -> None:
        self._config = model.config
        self._parameters = dict(model.named_parameters())
        self._missing = names.slots(model)
        self._origin = origin

    def fill(self, name: str, tensor: Tensor) -> None:
        """Copy a weight. Raises DayshiftError when it is not expected, comes twice or has a wrong shape."""
        slot = self._missing.pop(name, None)
        if slot is None:
            raise DayshiftError(
                f"{self._origin}: unexpected weight {name} for model_type {self._config.model_type}"
            )
        target = _view(self._parameters[slot.parameter].data, slot, self._config)
        if target.shape != tensor.shape:
            raise DayshiftError(
                f"{self._origin}: {name} has shape {tuple(tensor.shape)}, "
                f"the configuration implies {tuple(target.shape)}"
            )
        target.copy_(tensor)

    def check_complete(self) -> None:
        """Raise DayshiftError unless every weight has come."""
        if self._missing:
            raise DayshiftError(
                f"{self._origin} lacks {len(self._missing)} weights, {min(self._missing)} among them"
            )


def _view(parameter: Tensor, slot: Slot, config: ModelConfig) -> Tensor:
    if slot.expert is not None:
        parameter = parameter[slot.expert]
    if slot.part is None:
        return parameter
    rows_dim = 1 if parameter.dim() == 3 else 0  # all experts' matrices at once, or one matrix or bias
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
