"""The vision-language model of the small policy: sizes and an own tokenizer; its weights are trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
IMAGE_SIDE = 128
_PATCH, _SCALE = 16, 2
_WIDTH, _LAYERS, _HEADS = 192, 4, 6

_SPECIAL_TOKENS = {
    "unk_token": "<|endoftext|>",
    "bos_token": "<|im_start|>",
    "pad_token": "<|im_end|>",
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def write_vlm(folder: Path, sentences: Sequence[str]) -> None:
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
            "scale_factor": _SCALE,
            "pad_token_id": pad_token_id,
            "tie_word_embeddings": False,
            "text_config": {
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": _WIDTH,
                "intermediate_size": 512,
                "num_hidden_layers": _LAYERS,
                "num_attention_heads": _HEADS,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "rms_norm_eps": 1e-5,
                "pad_token_id": pad_token_id,
                "tie_word_embeddings": False,
            },
            "vision_config": {
                "hidden_size": _WIDTH,
                "intermediate_size": 4 * _WIDTH,
                "num_hidden_layers": _LAYERS,
                "num_attention_heads": _HEADS,
                "image_size": IMAGE_SIDE,
                "patch_size": _PATCH,
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
        image_seq_len=(IMAGE_SIDE // _PATCH // _SCALE) ** 2,
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
