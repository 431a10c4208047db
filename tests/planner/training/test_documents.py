"""The tokenizer, and token rows with who sees whom."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dayshift.engine.api import Message
from dayshift.engine.tokenizer import Tokenizer as EngineTokenizer
from dayshift.planner.protocol import SYSTEM_PROMPTS
from dayshift.planner.training.documents import (
    Rows,
    TurnEncoder,
    build_document,
    make_rows,
    place_document,
)
from dayshift.planner.training.export import export
from dayshift.planner.training.memory import MemoryRules, SessionMemory
from dayshift.planner.training.model import BLOCK, ModelConfig, PlannerModel, Visibility
from dayshift.planner.training.operations import OperationShape, TurnKind, make_operation
from dayshift.planner.training.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(vocab_size=1024, seed=0, num_operations=300)


@pytest.fixture(scope="module")
def encoder(tokenizer: Tokenizer) -> TurnEncoder:
    return TurnEncoder(tokenizer)


@given(text=st.text())
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str):
    if "<|" not in text:  # special tokens are control, not text
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@given(sentence=st.from_regex(r"[a-zA-Z]{1,9}( [a-z0-9-]{1,9}){0,6}", fullmatch=True))
def test_a_sentence_has_the_same_tokens_wherever_it_stands(tokenizer: Tokenizer, sentence: str):
    def tail(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    alone = tail(sentence)
    for before, after in (
        ("Shift 3, job 1, step 2: ", "."),
        ('{"action":"execute","task":"', '"}'),
        ('{"redo":[{"job":1,"step":2,"task":"', '"},{"job":'),
    ):
        assert tail(before + sentence + after) == tail(before) + alone + tail(after)


def test_numbers_below_100_are_one_token(tokenizer: Tokenizer):
    assert all(len(tokenizer.encode(str(number)).ids) == 1 for number in range(100))


def test_a_call_takes_few_tokens(encoder: TurnEncoder):
    operation = make_operation(Random(3), OperationShape(num_shifts=12, num_jobs=2, num_steps=3))
    prompts = [len(encoder.encode(turn).prompt) for turn in operation.turns]
    assert max(prompts) <= 60
    assert sum(prompts) / len(prompts) <= 30


def visible_text(rows: Rows, position: int, mask: torch.Tensor) -> list[int]:
    return [int(token) for token in rows.ids[0, : position + 1][mask[0, 0, position, : position + 1].numpy()]]


@pytest.mark.parametrize("seed", range(6))
def test_every_reply_sees_exactly_its_context(encoder: TurnEncoder, seed: int):
    """From the start of a session on, a reply's visible tokens are its context's, in their order."""
    rng = Random(seed)
    shape = OperationShape(num_shifts=4, num_jobs=1, num_steps=2, early_review_rate=0.3)
    operation = make_operation(rng, shape)
    rules = MemoryRules(window=300, is_recall_kept=seed % 2 == 0)
    document = build_document(rng, operation, rules, encoder, max_tokens=100_000, recall_rate=1.0, start=0)
    length = -(-len(document.ids) // BLOCK) * BLOCK
    rows = Rows(*(np.zeros((1, length), np.int32) for _ in range(5)))
    place_document(rows, 0, 0, len(document.ids), document)
    visibility = Visibility(1, length, torch.device("cpu"))
    visibility.update(torch.from_numpy(rows.expiry), torch.from_numpy(rows.group))
    mask = visibility.dense_mask()

    encoded = [encoder.encode(turn) for turn in operation.turns]
    first_end = len(encoder.system) + len(encoded[0].prompt) + len(encoded[0].reply)
    newline = encoder.newline if document.ids[first_end] == encoder.newline[0] else []
    memory = SessionMemory(
        rules,
        num_system_tokens=len(encoder.system),
        turn_lengths=[len(turn.prompt) + len(turn.reply) + len(newline) for turn in encoded],
    )
    position, num_seen = 0, 0
    for turn in operation.turns:
        is_review = turn.kind is TurnKind.REVIEW
        context = memory.call(operation.hours[turn.shift] if is_review else None)
        own = encoded[context.turn]
        expected = list(encoder.system)
        for index in context.order:
            expected += encoded[index].prompt + encoded[index].reply + newline
        expected += own.prompt
        # the last token of this turn's prompt is the first place whose visible text is the context's
        while visible_text(rows, position, mask) != expected:
            position += 1
            assert position < len(document.ids), (turn, context)
        num_seen += 1
    assert num_seen == len(operation.turns)


@settings(max_examples=10)
@given(st.integers(0, 2**20))
def test_block_mask_visits_every_visible_pair(encoder: TurnEncoder, seed: int):
    shape = (2, 4 * BLOCK)
    rows = make_rows(seed, encoder, num_rows=2, row_length=shape[1], max_window=256, max_document=400)
    visibility = Visibility(*shape, torch.device("cpu"))
    visibility.update(torch.from_numpy(rows.expiry), torch.from_numpy(rows.group))
    blocks = visibility.block_mask()
    dense = visibility.dense_mask().view(2, 4, BLOCK, 4, BLOCK).permute(0, 1, 3, 2, 4).flatten(-2)

    def listed(num_blocks: torch.Tensor | None, indices: torch.Tensor | None) -> torch.Tensor:
        assert num_blocks is not None
        assert indices is not None
        is_listed = torch.zeros(2, 4, 4, dtype=torch.bool)
        for row, query in np.ndindex(2, 4):
            is_listed[row, query, indices[row, 0, query, : num_blocks[row, 0, query]].long()] = True
        return is_listed

    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert not (partial & full).any()
    assert (dense.any(-1) <= (partial | full)).all()
    assert (full <= dense.all(-1)).all()


def test_chat_template_renders_what_the_encoder_encodes(
    encoder: TurnEncoder, tokenizer: Tokenizer, tmp_path: Path
):
    config = ModelConfig(
        hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16
    )
    export(PlannerModel(config), tokenizer, tmp_path)
    engine_tokenizer = EngineTokenizer(tmp_path)
    turns = make_operation(Random(2), OperationShape(num_shifts=1)).turns[:3]
    messages = [Message("system", SYSTEM_PROMPTS["compact"])]
    ids = list(encoder.system)
    for turn in turns:
        messages += [Message("user", turn.user), Message("assistant", turn.reply)]
        encoded = encoder.encode(turn)
        ids += encoded.prompt + encoded.reply + encoder.newline
    messages.append(Message("user", turns[0].user))
    ids += encoder.encode(turns[0]).prompt
    rendered = engine_tokenizer.render_chat(messages)
    assert engine_tokenizer.encode(rendered) == ids
