"""lerobot's own training, in a process of its own, and a checkpoint that needs no other files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dayshift.policy.smolvla.folders import BUNDLED_VLM
from dayshift.policy.training.vlm import IMAGE_SIDE
from dayshift.types import DayshiftError

CHUNK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What a training is run with. `start_from` is a checkpoint to fine-tune, else weights are random."""

    num_steps: int
    batch_size: int = 64
    num_workers: int = 4
    device: str = "cuda"
    learning_rate: float = 3e-4
    seed: int = 1
    start_from: Path | None = None


def train(dataset: Path, vlm: Path, folder: Path, options: TrainingOptions) -> Path:
    """Train on a local LeRobot dataset; lerobot's last checkpoint. Its output goes to `folder`/train.log.

    Raises DayshiftError when lerobot ends with an error.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output, log = folder / "lerobot", folder / "train.log"
    shutil.rmtree(output, ignore_errors=True)  # of a training that was stopped
    command = [
        sys.executable,
        "-m",
        "lerobot.scripts.lerobot_train",
        *_arguments(dataset, vlm, output, options),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False)
    if done.returncode:
        last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise DayshiftError(f"lerobot's training failed: {last} (log: {log})")
    return trained(folder)


def trained(folder: Path) -> Path:
    """Where `train` leaves lerobot's last checkpoint, which a further training can start from."""
    return folder / "lerobot" / "checkpoints" / "last" / "pretrained_model"


def assemble(pretrained: Path, vlm: Path, checkpoint: Path) -> None:
    """Copy a trained policy and its VLM's configuration and tokenizer into one folder that can be moved."""
    shutil.copytree(pretrained, checkpoint, dirs_exist_ok=True)
    (checkpoint / "train_config.json").unlink(missing_ok=True)
    for name in ("config.json", "policy_preprocessor.json"):  # they name the VLM by its path on this machine
        text = (checkpoint / name).read_text(encoding="utf-8")
        (checkpoint / name).write_text(
            text.replace(json.dumps(str(vlm)), f'"{BUNDLED_VLM}"'), encoding="utf-8"
        )
    (checkpoint / BUNDLED_VLM).mkdir(exist_ok=True)
    for name in ("config.json", "processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (vlm / name).is_file():
            shutil.copy(vlm / name, checkpoint / BUNDLED_VLM / name)


def _arguments(dataset: Path, vlm: Path, output: Path, options: TrainingOptions) -> list[str]:
    settings: dict[str, object] = {
        "dataset.repo_id": "dayshift/demonstrations",
        "dataset.root": dataset,
        "dataset.use_imagenet_stats": "false",
        "dataset.video_backend": "pyav",
        "policy.push_to_hub": "false",
        "policy.device": options.device,
        "policy.optimizer_lr": options.learning_rate,
        "policy.scheduler_warmup_steps": min(200, options.num_steps // 10),
        "policy.scheduler_decay_steps": options.num_steps,
        "batch_size": options.batch_size,
        "num_workers": options.num_workers,
        "steps": options.num_steps,
        "save_freq": options.num_steps,
        "log_freq": max(1, min(100, options.num_steps // 5)),
        "env_eval_freq": 0,
        "eval_steps": 0,
        "seed": options.seed,
        "wandb.enable": "false",
        "output_dir": output,
    }
    if options.start_from is not None:
        settings["policy.path"] = options.start_from
    else:
        settings |= {
            "policy.type": "smolvla",
            "policy.vlm_model_name": vlm,
            "policy.load_vlm_weights": "false",
            "policy.train_expert_only": "false",
            "policy.freeze_vision_encoder": "false",
            "policy.num_vlm_layers": 4,
            "policy.resize_imgs_with_padding": f"[{IMAGE_SIDE},{IMAGE_SIDE}]",
            "policy.chunk_size": CHUNK_SIZE,
            "policy.n_action_steps": CHUNK_SIZE // 2,
            "policy.max_state_dim": 8,
            "policy.max_action_dim": 8,
        }
    return [f"--{name}={value}" for name, value in settings.items()]
