"""A trained policy as one folder that can be moved: bfloat16 weights, processors, tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dayshift.policy.smolvla.folders import BUNDLED_VLM
from dayshift.policy.smolvla.weights import WEIGHTS_FILE

_VLM_FILES = ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json")
_NOT_NEEDED = ("train_config.json", "README.md")


def assemble(pretrained: Path, vlm: Path, checkpoint: Path) -> None:
    """Copy lerobot's checkpoint and its VLM's configuration and tokenizer, weights in half the size."""
    shutil.copytree(pretrained, checkpoint, dirs_exist_ok=True)
    for name in _NOT_NEEDED:
        (checkpoint / name).unlink(missing_ok=True)
    for name in ("config.json", "policy_preprocessor.json"):  # they name the VLM by its path on this machine
        text = (checkpoint / name).read_text(encoding="utf-8")
        (checkpoint / name).write_text(
            text.replace(json.dumps(str(vlm)), f'"{BUNDLED_VLM}"'), encoding="utf-8"
        )
    weights = load_file(checkpoint / WEIGHTS_FILE)
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()},
        checkpoint / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )
    (checkpoint / BUNDLED_VLM).mkdir(exist_ok=True)
    for name in _VLM_FILES:
        if (vlm / name).is_file():
            shutil.copy(vlm / name, checkpoint / BUNDLED_VLM / name)
