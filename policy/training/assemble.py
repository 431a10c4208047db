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
    _rename_vlm(checkpoint)
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


def _rename_vlm(checkpoint: Path) -> None:
    """Both files name the VLM, and a further training what it began with, by a path on this machine."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"vlm_model_name": BUNDLED_VLM, "pretrained_path": None}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    path = checkpoint / "policy_preprocessor.json"
    processor = json.loads(path.read_text(encoding="utf-8"))
    for step in processor["steps"]:
        if "tokenizer_name" in step["config"]:
            step["config"]["tokenizer_name"] = BUNDLED_VLM
    path.write_text(json.dumps(processor, indent=2), encoding="utf-8")
