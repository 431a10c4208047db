"""The vision-language model of the small policy: sizes and an own tokenizer; its weights are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
IMAGE_SIDE = 128  # pixels that the cameras are rendered with
_HEAD_DIM = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySize:
    """Sizes of a SmolVLA. `scale` patches along each side become one token; widths are multiples of 32."""

    image_side: int  # pixels that the vision tower sees
    patch: int
    scale: int
    vision_width: int
    text_width: int
    num_kv_heads: int
    num_layers: int  # of the vision tower, of the text and of the action expert


SIZES = {
    "nano": PolicySize(  # 1.7M parameters; learns on a CPU
        image_side=64,
        patch=16,
        scale=2,
        vision_width=128,
        text_width=128,
        num_kv_heads=2,
        num_layers=3,
    ),
    "small": PolicySize(  # 7.1M parameters; wants a GPU to learn
        image_side=128,
        patch=8,
        scale=4,
        vision_width=192,
        text_width=256,
        num_kv_heads=4,
        num_layers=4,
    ),
}

_SPECIAL_TOKENS = {
    "unk_token": "<|endoftext|>",
    "bos_token": "<|im_start|>",
    "pad_token": "<|im_end|>",
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def write_vlm(folder: Path, sentences: Sequence[str], size: PolicySize) -> None:
    """Write config, processor and a byte-level BPE trained on `sentences`, as lerobot loads them."""
    from transformers import (
        PreTrainedTokenizerFast,
        SmolVLMConfig,
        SmolVLMImageProcessor,
        SmolVLMProcessor,
    )
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    tokenizer = _train_tokenizer(sentences)
    pad_token_id = tokenizer.token_to_id(_SPECIAL_TOKENS["pad_token"])
    config = SmolVLMConfig.from_dict(
        {
            "image_token_id": tokenizer.token_to_id(_SPECIAL_TOKENS["image_token"]),
            "scale_factor": size.scale,
            "pad_token_id": pad_token_id,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": size.text_width,
                "intermediate_size": 2 * size.text_width,
                "num_hidden_layers": size.num_layers,
                "num_attention_heads": size.text_width // _HEAD_DIM,
                "num_key_value_heads": size.num_kv_heads,
                "head_dim": _HEAD_DIM,
                "rms_norm_eps": 1e-5,
                "pad_token_id": pad_token_id,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "hidden_size": size.vision_width,
                "intermediate_size": 4 * size.vision_width,
                "num_hidden_layers": size.num_layers,
                "num_attention_heads": size.vision_width // _HEAD_DIM,
                "image_size": size.image_side,
                "patch_size": size.patch,
            },
        }
    )
    config.architectures = ["SmolVLMForConditionalGeneration"]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    named = dict(_SPECIAL_TOKENS)
    base = {name: named.pop(name) for name in ("unk_token", "bos_token", "pad_token")}
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, padding_side="right", **base, extra_special_tokens=named
        ),
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=(size.image_side // size.patch // size.scale) ** 2,
    ).save_pretrained(folder)


def _train_tokenizer(sentences: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{sentence}\n" for sentence in sentences], trainer)
    return tokenizer
