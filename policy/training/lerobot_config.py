"""What a training is run with, in our words and in lerobot's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
from lerobot.configs.default import DatasetConfig
from lerobot.configs.train import TrainPipelineConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

from dayshift.policy.training.dataset import ACTION, REPO_ID, STATE
from dayshift.policy.training.episodes import CAMERA_FEATURES
from dayshift.policy.training.vlm import IMAGE_SIDE, SIZES, PolicySize
from dayshift.types import DayshiftError

CHUNK_SIZE = 16
_MAX_DIM = 8  # what states and actions are padded to
_WEIGHT_DECAY = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """`start_from` is a checkpoint to fine-tune, else weights are random.

    `begin_at`: the share of the control steps that must be there before training begins; the rest comes
    meanwhile. `is_compiled`: on CUDA, in bfloat16: quicker updates after a slow start; else float32, because
    casts that are not fused cost more than they save. `max_s`: if `num_steps` updates would take longer, the
    learning rate's schedule goes faster and training ends after so many seconds.
    """

    num_steps: int
    size: PolicySize = SIZES["small"]
    batch_size: int = 256
    device: str = "cuda"
    learning_rate: float = 5e-4
    seed: int = 1
    start_from: Path | None = None
    begin_at: float = 0.2
    is_compiled: bool = True
    max_s: float = float("inf")
    save_every_s: float = 300.0


def training_config(vlm: Path, output: Path, options: TrainingOptions) -> TrainPipelineConfig:
    """As `lerobot-train` would have made it from its command line."""
    config = TrainPipelineConfig(
        dataset=DatasetConfig(repo_id=REPO_ID, use_imagenet_stats=False, video_backend="pyav"),
        policy=_policy_config(vlm, options),
        output_dir=output,
        seed=options.seed,
        batch_size=options.batch_size,
        steps=options.num_steps,
    )
    config.validate()
    return config


def processor_arguments(policy: SmolVLAConfig, dataset: LeRobotDataset) -> dict[str, Any]:
    """For lerobot's `make_pre_post_processors`: a checkpoint's processors take the dataset's statistics."""
    if policy.pretrained_path is None:
        return {"dataset_stats": dataset.meta.stats}
    normalizer = {
        "stats": dataset.meta.stats,
        "features": (policy.input_features or {}) | (policy.output_features or {}),
        "norm_map": policy.normalization_mapping,
    }
    return {
        "preprocessor_overrides": {
            "device_processor": {"device": policy.device},
            "normalizer_processor": normalizer,
        },
        "postprocessor_overrides": {
            "unnormalizer_processor": normalizer | {"features": policy.output_features}
        },
    }


def _policy_config(vlm: Path, options: TrainingOptions) -> SmolVLAConfig:
    if options.start_from is not None:
        config = PreTrainedConfig.from_pretrained(options.start_from)
        if not isinstance(config, SmolVLAConfig):
            raise DayshiftError(f"{options.start_from} is a policy of type {config.type}; allowed: smolvla")
        config.pretrained_path = options.start_from
    else:
        image = PolicyFeature(FeatureType.VISUAL, (3, IMAGE_SIDE, IMAGE_SIDE))
        config = SmolVLAConfig(
            input_features={
                **dict.fromkeys(CAMERA_FEATURES, image),
                STATE: PolicyFeature(FeatureType.STATE, (8,)),
            },
            output_features={ACTION: PolicyFeature(FeatureType.ACTION, (7,))},
            vlm_model_name=str(vlm),
            load_vlm_weights=False,
            train_expert_only=False,
            freeze_vision_encoder=False,
            num_vlm_layers=options.size.num_layers,
            resize_imgs_with_padding=(options.size.image_side, options.size.image_side),
            chunk_size=CHUNK_SIZE,
            n_action_steps=CHUNK_SIZE // 2,
            max_state_dim=_MAX_DIM,
            max_action_dim=_MAX_DIM,
            optimizer_weight_decay=_WEIGHT_DECAY,
        )
    config.push_to_hub = False
    config.device = options.device
    config.optimizer_lr = options.learning_rate
    config.scheduler_warmup_steps = min(300, options.num_steps // 10)
    config.scheduler_decay_steps = options.num_steps
    return config
