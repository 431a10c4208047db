"""What a model is and what it takes, from its files' headers. No torch here, and no weight is read."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.formats import is_gguf, load_model_config
from dayshift.engine.models.gguf_config import ROPE_FACTORS
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """A model that the engine can load."""

    path: Path
    format: Literal["safetensors", "gguf"]
    config: ModelConfig
    file_bytes: int
    num_parameters: int
    num_active_parameters: int  # of one token: its experts only
    weight_types: Mapping[str, int]  # parameters by the type they are stored as, the commonest first
    session_refusal: str | None  # why there can be no sessions, if so

    def loaded_bytes(self, itemsize: int) -> int:
        """Memory of the weights once loaded; quantised ones are unpacked."""
        return self.num_parameters * itemsize


def inspect_model(path: Path) -> ModelReport:
    """Raises DayshiftError with the reason when the engine cannot load the model."""
    config = load_model_config(path)
    if is_gguf(path):
        file = open_gguf(path)
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
    )


def _weights(file: Path, config: ModelConfig) -> Iterable[tuple[str, int]]:
    """Type and number of parameters of every weight in a safetensors file."""
    try:
        with safe_open(file, framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118 - safe_open is no mapping
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue  # tied, and written all the same
                weight = opened.get_slice(name)
                yield weight.get_dtype(), math.prod(weight.get_shape())
    except SafetensorError as error:
        raise DayshiftError(f"{file} is not a readable safetensors file: {error}") from error


def _num_idle_parameters(config: ModelConfig) -> int:
    """Parameters of the experts that a token does not pass."""
    moe = config.moe
    if moe is None:
        return 0
    per_expert = 3 * config.hidden_size * moe.intermediate_size  # gate, up, down
    return config.num_layers * (moe.num_experts - moe.num_experts_per_token) * per_expert
