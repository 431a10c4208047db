"""The planner's tokenizer: byte-level BPE in which the protocol's fixed text is short.

Every fixed piece of the protocol (`{"action":"execute","task":"`, `Result: done.` …) is cut out
whole, so that BPE makes it one token; a number of one or two digits is one token; words keep their
trailing space, so that a sentence has the same tokens in a message and in a reply, and copying it is
copying tokens.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dayshift.planner import protocol
from dayshift.planner.jobs import JobStep
from dayshift.planner.training.operations import make_operation, random_shape
from dayshift.types import StepKey

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def fixed_pieces() -> list[str]:
    """The protocol's texts between its numbers and sentences, longest first."""
    step = JobStep(StepKey(1, 2, 3), "\0")
    texts = [
        protocol.step_message(step),
        protocol.redo_message(step),
        protocol.done_message(),
        protocol.failed_message(1, 2),
        protocol.review_message(1),
        protocol.repair_message("\0"),
        protocol.format_reply(protocol.Execute("\0")),
        protocol.format_reply(protocol.Next()),
        protocol.format_reply(protocol.GiveUp(step.key, "\0")),
        protocol.format_reply(protocol.Redo(())),
        protocol.format_reply(protocol.Redo(((1, 2, "\0"), (1, 2, "\0")))),
        "user\n",
        "assistant\n",
        "system\n",
    ]
    # json.dumps writes the NUL placeholder as an escape
    pieces = {piece for text in texts for piece in re.split(r"\d|\0", text.replace("\\u0000", "\0"))}
    return sorted((piece for piece in pieces if len(piece) > 1), key=lambda piece: (-len(piece), piece))


def train_tokenizer(*, vocab_size: int, seed: int, num_operations: int = 1500) -> Tokenizer:
    """Train on the text of synthetic operations."""
    rng = Random(seed)
    literals = "|".join(re.escape(piece) for piece in fixed_pieces())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(rf"{literals}|\d{{1,2}}|\p{{L}}+ ?|[^\p{{L}}\d]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts: list[str] = []
    for _ in range(num_operations):
        operation = make_operation(rng, random_shape(rng, max_turns=60))
        texts += [
            f"user\n{turn.user}{TURN_END}assistant\n{turn.reply}{TURN_END}system\n"
            for turn in operation.turns
        ]
    texts += [f"{number} " for number in range(100)] * 200  # every number below 100 is one token
    # special tokens are not cut out while training: keep them from joining other text
    tokenizer.train_from_iterator(
        (piece for text in texts for piece in text.split(TURN_END) if piece), trainer
    )
    return tokenizer


def tokenizer_config(max_position: int) -> dict[str, Any]:
    """`tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
