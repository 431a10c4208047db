"""What a model is and what it takes, from its files' headers. No weight is read, and no torch is
imported for models that our decoder knows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.formats import fallback_reason, is_gguf, load_model_config
from dayshift.engine.models.gguf_config import ROPE_FACTORS
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A model that the engine can load, with our decoder or with `transformers`."""

    path: Path
    format: Literal["safetensors", "gguf"]
    config: ModelConfig
    file_bytes: int
    num_parameters: int
    num_active_parameters: int  # of one token: its experts only
    weight_types: Mapping[str, int]  # parameters by the type they are stored as, the commonest first
    session_refusal: str | None  # why there can be no sessions, if so
    fallback_reason: str | None  # why it runs on transformers, if so

    def loaded_bytes(self, itemsize: int) -> int:
        """Memory of the weights once loaded with all of them unpacked, as on a CPU."""
        return self.num_parameters * itemsize


def inspect_model(path: Path) -> ModelReport:
    """Raises DayshiftError with the reason when the engine cannot load the model."""
    reason = fallback_reason(path)
    if is_gguf(path):
        config, file = load_model_config(path), open_gguf(path)
        weights = [
            (tensor.quant_type.name, math.prod(tensor.shape))
            for name, tensor in file.tensors.items()
            if name != ROPE_FACTORS
        ]
        file_bytes = sum(part.stat().st_size for part in file.parts)
    else:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise DayshiftError(f"model folder {path} has no .safetensors file")
        config = load_model_config(path) if reason is None else _fallback_config(path)
        weights = [weight for file in files for weight in _weights(file, config)]
        file_bytes = sum(file.stat().st_size for file in files)
    types: Counter[str] = Counter()
    for stored_as, size in weights:
        types[stored_as] += size
    num_parameters = types.total()
    return ModelReport(
        path=path,
        format="gguf" if is_gguf(path) else "safetensors",
        config=config,
        file_bytes=file_bytes,
        num_parameters=num_parameters,
        num_active_parameters=num_parameters - _num_idle_parameters(config),
        weight_types=dict(types.most_common()),
        session_refusal=Tokenizer(path).session_refusal,
        fallback_reason=reason,
    )


def _fallback_config(folder: Path) -> ModelConfig:
    # Torch and transformers: seconds that are waited for only where they are needed.
    from dayshift.engine.models.fallback import read_fallback_config

    return read_fallback_config(folder)


def _weights(file: Path, config: ModelConfig) -> Iterable[tuple[str, int]]:
    """Type and number of parameters of every weight in a safetensors file."""
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue  # tied, and written all the same
                weight = opened.get_slice(name)
                size = math.prod(weight.get_shape())
                if name.endswith("_blocks") and weight.get_dtype() == "U8":
                    yield "MXFP4", 2 * size  # two weights to a byte
                elif not (name.endswith("_scales") and weight.get_dtype() == "U8"):
                    yield weight.get_dtype(), size
    except SafetensorError as error:
        raise DayshiftError(f"{file} is not a readable safetensors file: {error}") from error


def _num_idle_parameters(config: ModelConfig) -> int:
    """Parameters of the experts that a token does not pass."""
    moe = config.moe
    if moe is None:
        return 0
    per_expert = 3 * config.hidden_size * moe.intermediate_size  # gate, up, down
    return config.num_layers * (moe.num_experts - moe.num_experts_per_token) * per_expert
