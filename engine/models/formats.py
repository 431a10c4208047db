"""The two formats of models: a folder as Hugging Face writes it, and a GGUF file. No torch here."""

from __future__ import annotations

from pathlib import Path

from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.gguf_config import read_gguf_config
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.models.hugging_face_config import UnsupportedModelError, read_hugging_face_config


def is_gguf(model: Path) -> bool:
    """The model is one GGUF file, not a folder."""
    return model.suffix == ".gguf"


def load_model_config(model: Path) -> ModelConfig:
    """Read the configuration of a model folder or GGUF file.

    Raises DayshiftError for an architecture or option that is not supported.
    """
    return read_gguf_config(open_gguf(model)) if is_gguf(model) else read_hugging_face_config(model)


def fallback_reason(model: Path) -> str | None:
    """Why a model folder runs on `transformers` instead of our decoder; None if it does not."""
    if is_gguf(model) or not (model / "config.json").is_file():
        return None
    try:
        read_hugging_face_config(model)
    except UnsupportedModelError as error:
        return str(error)
    return None
