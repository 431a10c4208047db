"""Write and read the model folder: the files that Hugging Face and our engine load."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from dayshift.planner.training.model import PlannerModel
from dayshift.planner.training.tokenizer import END_OF_TEXT, TURN_END, tokenizer_config
from dayshift.types import DayshiftError

MAX_WEIGHTS_BYTES = 16_000_000


def export(model: PlannerModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Save config, bfloat16 weights in one file, tokenizer and chat template to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    weights = folder / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    if weights.stat().st_size > MAX_WEIGHTS_BYTES:
        raise DayshiftError(
            f"{weights} has {weights.stat().st_size} bytes, at most {MAX_WEIGHTS_BYTES} are allowed"
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = model.config
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    _write_json(folder / "config.json", config.to_hugging_face())
    _write_json(folder / "tokenizer_config.json", tokenizer_config(config.max_position))
    _write_json(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[1]}
    )


def load(model: PlannerModel, folder: Path) -> None:
    """Load weights that `export` wrote into a model of the same shape."""
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def _write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
