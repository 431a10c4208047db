"""What happens around the model: lerobot's saved pre- and postprocessor pipelines, read as data.

lerobot saves each pipeline as a JSON list of steps with a safetensors file of statistics. The steps that
SmolVLA checkpoints have are understood; another step is refused, since leaving it out would
change the actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dayshift.policy.smolvla.config import ACTION, Feature, read_struct
from dayshift.types import DayshiftError

_TRANSPORT_STEPS = ("to_batch_processor", "device_processor")  # change no number
_NEWLINE_STEP = "smolvla_new_line_processor"
_RENAME_STEP = "rename_observations_processor"
_TOKENIZER_STEP = "tokenizer_processor"
_NORMALIZER_STEP = "normalizer_processor"
_UNNORMALIZER_STEP = "unnormalizer_processor"

_BOUNDS = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalizer:
    """normalize(x) = (x - shift) / divisor + offset; unnormalize(y) = (y - offset) * factor + shift.

    `divisor` and `factor` differ by lerobot's epsilon, which only the way in adds. float32, shaped like
    the feature (images: (channels, 1, 1)).
    """

    shift: Tensor
    divisor: Tensor
    factor: Tensor
    offset: float

    def normalize(self, x: Tensor) -> Tensor:
        """Dataset units -> model units."""
        return (x - self.shift.to(x.device)) / self.divisor.to(x.device) + self.offset

    def unnormalize(self, y: Tensor) -> Tensor:
        """Model units -> dataset units."""
        return (y - self.offset) * self.factor.to(y.device) + self.shift.to(y.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Processors:
    """Both pipelines of a checkpoint. A feature without a normaliser passes unchanged."""

    renamed: dict[str, str]  # observation name as the client sends it -> as the policy knows it
    ends_with_newline: bool
    max_text_length: int
    inputs: dict[str, Normalizer]
    action: Normalizer | None


class _StepConfig(msgspec.Struct, frozen=True, kw_only=True):
    rename_map: dict[str, str] = {}
    max_length: int = 512
    eps: float = 1e-8
    features: dict[str, Feature] = {}
    norm_map: dict[str, str] = {}
    normalize_observation_keys: list[str] | None = None


class _Step(msgspec.Struct, frozen=True, kw_only=True):
    registry_name: str = "(unregistered)"
    config: _StepConfig = _StepConfig()
    state_file: str | None = None


class _Pipeline(msgspec.Struct, frozen=True):
    steps: list[_Step]


def load_processors(folder: Path) -> Processors:
    """Read both pipelines of a checkpoint. Raises DayshiftError for a step that is not known here."""
    known = (*_TRANSPORT_STEPS, _RENAME_STEP, _NEWLINE_STEP, _TOKENIZER_STEP, _NORMALIZER_STEP)
    before = _read_steps(folder / "policy_preprocessor.json", known)
    after = _read_steps(folder / "policy_postprocessor.json", (*_TRANSPORT_STEPS, _UNNORMALIZER_STEP))
    if _TOKENIZER_STEP not in before:
        raise DayshiftError(f"{folder / 'policy_preprocessor.json'}: there is no {_TOKENIZER_STEP} step")
    inputs: dict[str, Normalizer] = {}
    if _NORMALIZER_STEP in before:
        inputs = _read_normalizers(folder, before[_NORMALIZER_STEP])
    outputs: dict[str, Normalizer] = {}
    if _UNNORMALIZER_STEP in after:
        outputs = _read_normalizers(folder, after[_UNNORMALIZER_STEP])
    return Processors(
        renamed=before[_RENAME_STEP].config.rename_map if _RENAME_STEP in before else {},
        ends_with_newline=_NEWLINE_STEP in before,
        max_text_length=before[_TOKENIZER_STEP].config.max_length,
        inputs=inputs,
        action=outputs.get(ACTION),
    )


def _read_steps(path: Path, known: tuple[str, ...]) -> dict[str, _Step]:
    if not path.is_file():
        raise DayshiftError(
            f"{path.parent} has no {path.name}; "
            "lerobot's migrate_policy_normalization writes it for old checkpoints"
        )
    steps = {step.registry_name: step for step in read_struct(path, _Pipeline).steps}
    for name in steps:
        if name not in known:
            raise DayshiftError(f"{path}: step {name} is not supported; supported are {', '.join(known)}")
    return steps


def _read_normalizers(folder: Path, step: _Step) -> dict[str, Normalizer]:
    if step.state_file is None:  # the policy was saved without statistics
        return {}
    path = folder / step.state_file
    try:
        flat = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DayshiftError(f"{path} is not a readable safetensors file: {error}") from error
    stats: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        feature, _, stat = name.rpartition(".")
        stats.setdefault(feature, {})[stat] = tensor.float()
    keys = step.config.normalize_observation_keys
    return {
        name: _normalizer(path, name, feature, mode, stats[name], step.config.eps)
        for name, feature in step.config.features.items()
        if (mode := step.config.norm_map.get(feature.type, "IDENTITY")) != "IDENTITY"
        and name in stats
        and (keys is None or name in keys or name == ACTION)
    }


def _normalizer(
    path: Path, name: str, feature: Feature, mode: str, stats: dict[str, Tensor], eps: float
) -> Normalizer:
    wanted = ("mean", "std") if mode == "MEAN_STD" else _BOUNDS.get(mode)
    if wanted is None:
        allowed = ", ".join(("IDENTITY", "MEAN_STD", *_BOUNDS))
        raise DayshiftError(f"{path}: normalisation {mode} of {name} is not supported; supported: {allowed}")
    shape = (feature.shape[0], 1, 1) if feature.type == "VISUAL" else feature.shape
    for stat in wanted:
        if stat not in stats or stats[stat].numel() != feature.shape[0]:
            raise DayshiftError(
                f"{path}: {mode} of {name} needs {name}.{stat} with {feature.shape[0]} numbers"
            )
    first, second = (stats[stat].reshape(shape) for stat in wanted)
    if mode == "MEAN_STD":
        return Normalizer(shift=first, divisor=second + eps, factor=second, offset=0.0)
    width = second - first
    half = torch.where(width == 0, torch.full_like(width, eps), width) / 2
    return Normalizer(shift=first, divisor=half, factor=half, offset=-1.0)
