"""Small random SmolVLA checkpoints of many shapes, written by lerobot itself, for the parity check."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from lerobot.processor import PolicyProcessorPipeline
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

from dayshift.policy.smolvla.config import ACTION, IMAGE_PREFIX, STATE

_SPECIAL_TOKENS = {
    "unk_token": "<|endoftext|>",
    "bos_token": "<|im_start|>",
    "pad_token": "<|im_end|>",
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
_IMAGE_SEQ_LEN = 4  # asked for by the processor's constructor, not used by the policy


@dataclass(frozen=True, kw_only=True)
class ParityCase:
    """One configuration. `policy`, `text` and `vision` are what differs from the small defaults."""

    name: str
    cameras: Mapping[str, tuple[int, int]] = field(
        default_factory=lambda: {"image": (64, 64), "image2": (64, 64)}
    )  # height, width
    unsent_cameras: tuple[str, ...] = ()  # declared, but in no request
    state_dim: int = 8
    action_dim: int = 7
    normalization: Mapping[str, str] = field(
        default_factory=lambda: {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    policy: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    scale_factor: int = 2
    tie_word_embeddings: bool = False


CASES = (
    ParityCase(name="two cameras, every second layer self-attention"),
    ParityCase(name="one camera, chunk of 1", cameras={"top": (64, 64)}, policy={"chunk_size": 1}),
    ParityCase(
        name="three cameras of different sizes, padded",
        cameras={"a": (48, 64), "b": (90, 50), "c": (128, 128)},
    ),
    ParityCase(name="camera not sent", unsent_cameras=("image",)),
    ParityCase(
        name="two empty cameras, tokens around images",
        unsent_cameras=("image",),
        policy={"empty_cameras": 2, "add_image_special_tokens": True},
    ),
    ParityCase(
        name="self-attention every 3 layers, expert width 0.5",
        policy={"self_attn_every_n_layers": 3, "expert_width_multiplier": 0.5},
    ),
    ParityCase(
        name="cross-attention only, half as many expert layers",
        policy={"self_attn_every_n_layers": -1, "num_expert_layers": 2},
    ),
    ParityCase(name="self-attention only", policy={"attention_mode": "self_attn"}),
    ParityCase(
        name="prefix length 160, text padded to 48",
        policy={"prefix_length": 160, "pad_language_to": "max_length"},
    ),
    ParityCase(
        name="9 state and 3 action numbers, unpadded; 5 Euler steps",
        state_dim=9,
        action_dim=3,
        policy={
            "max_state_dim": 9,
            "max_action_dim": 3,
            "num_steps": 5,
            "min_period": 0.01,
            "max_period": 2.0,
        },
    ),
    ParityCase(
        name="2 of 4 text layers, texts cut at 6 tokens",
        policy={"num_vlm_layers": 2, "tokenizer_max_length": 6},
    ),
    ParityCase(
        name="all text layers, biases, one KV head",
        policy={"num_vlm_layers": 0},
        text={"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    ParityCase(
        name="larger images than the tower's positions, shuffle 3",
        policy={"resize_imgs_with_padding": (96, 96)},
        scale_factor=3,
    ),
    ParityCase(
        name="min-max state, quantile actions, normalised images",
        normalization={"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "QUANTILES"},
    ),
    ParityCase(name="tied embeddings", tie_word_embeddings=True),
)

FULL_SIZE = ParityCase(
    name="450M, two cameras of 256 pixels",
    cameras={"image": (256, 256), "image2": (256, 256)},
    policy={"resize_imgs_with_padding": (512, 512), "num_vlm_layers": 16, "chunk_size": 50},
    text={
        "vocab_size": 49280,
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "head_dim": 64,
    },
    vision={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
    },
    scale_factor=4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """lerobot's own policy and pipelines, as they were saved."""

    policy: SmolVLAPolicy
    before: PolicyProcessorPipeline[dict[str, Any], dict[str, Any]]
    after: PolicyProcessorPipeline[torch.Tensor, torch.Tensor]


def write_checkpoint(folder: Path, case: ParityCase, seed: int = 0) -> Reference:
    """Write a random checkpoint of `case` into `folder`, its VLM's configuration and tokenizer in `vlm/`."""
    torch.manual_seed(seed)
    _write_vlm(folder / "vlm", case)
    visual = {
        f"{IMAGE_PREFIX}{name}": PolicyFeature(FeatureType.VISUAL, (3, *size))
        for name, size in case.cameras.items()
    }
    state = {STATE: PolicyFeature(FeatureType.STATE, (case.state_dim,))}
    small = {"resize_imgs_with_padding": (64, 64), "num_vlm_layers": 4, "chunk_size": 10}
    settings = small | dict(case.policy)
    config = SmolVLAConfig(
        vlm_model_name=str(folder / "vlm"),
        load_vlm_weights=False,
        device="cpu",
        n_action_steps=1,
        normalization_mapping={name: NormalizationMode(mode) for name, mode in case.normalization.items()},
        input_features=visual | state,
        output_features={ACTION: PolicyFeature(FeatureType.ACTION, (case.action_dim,))},
        **settings,
    )
    policy = SmolVLAPolicy(config)
    _randomise(policy)
    before, after = make_smolvla_pre_post_processors(config, _random_stats(case))
    policy.save_pretrained(folder)
    before.save_pretrained(folder)
    after.save_pretrained(folder)
    return Reference(policy=policy.eval(), before=before, after=after)


def _randomise(policy: SmolVLAPolicy) -> None:
    """Weights that keep activations near 1, so that every part of the network matters to the actions."""
    for parameter in policy.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter[0].numel()))
        else:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.5)


def _random_stats(case: ParityCase) -> dict[str, dict[str, torch.Tensor]]:
    shapes = {STATE: (case.state_dim,), ACTION: (case.action_dim,)}
    shapes |= {f"{IMAGE_PREFIX}{name}": (3, 1, 1) for name in case.cameras}
    stats: dict[str, dict[str, torch.Tensor]] = {}
    for name, shape in shapes.items():
        low, width = torch.randn(shape), torch.rand(shape) + 0.5
        stats[name] = {
            "mean": low,
            "std": width,
            "min": low,
            "max": low + width,
            "q01": low,
            "q99": low + width,
        }
    return stats


def _write_vlm(folder: Path, case: ParityCase) -> None:
    tokenizer = _byte_tokenizer()
    pad_token_id = tokenizer.token_to_id(_SPECIAL_TOKENS["pad_token"])
    text = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "pad_token_id": pad_token_id,
        "tie_word_embeddings": case.tie_word_embeddings,
    } | dict(case.text)
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": 64,
        "patch_size": 16,
    } | dict(case.vision)
    config = SmolVLMConfig.from_dict(
        {
            "image_token_id": tokenizer.token_to_id(_SPECIAL_TOKENS["image_token"]),
            "scale_factor": case.scale_factor,
            "pad_token_id": pad_token_id,
            "tie_word_embeddings": case.tie_word_embeddings,
            "text_config": text,
            "vision_config": vision,
        }
    )
    config.save_pretrained(folder)
    named = dict(_SPECIAL_TOKENS)
    base = {name: named.pop(name) for name in ("unk_token", "bos_token", "pad_token")}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **base, extra_special_tokens=named)
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=fast,
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=_IMAGE_SEQ_LEN,
    ).save_pretrained(folder)


def _byte_tokenizer() -> Tokenizer:
    """One token a byte, after the special tokens."""
    alphabet = (*_SPECIAL_TOKENS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS.values()))
    return tokenizer
