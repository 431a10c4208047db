"""Looking ahead in a grammar along a draft sees what going there sees, and leaves it where it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.dialects import find_dialect, reply_grammar
from dayshift.engine.dialects.grammars import ReplyRules
from dayshift.engine.grammar import GrammarCompiler, GrammarMatcher
from dayshift.engine.tokenizer import Tokenizer
from tests.engine.dialect_models import DIALECTS, make_dialect_model
from tests.engine.test_dialects import rules_of_replies


@pytest.fixture(scope="module")
def tokenizers_by_dialect(make_tiny_model: Callable[..., Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(make_dialect_model(make_tiny_model, name)) for name in DIALECTS}


def allowed_ids(matcher: GrammarMatcher) -> list[int]:
    return np.flatnonzero(np.unpackbits(matcher.allowed_mask().view(np.uint8), bitorder="little")).tolist()


@given(
    name=st.sampled_from(DIALECTS),
    rules=rules_of_replies,
    seed=st.integers(0, 2**32),
    num_before=st.integers(0, 30),
    num_drafts=st.integers(1, 7),
    wrong_at=st.none() | st.integers(0, 6),
)
@settings(max_examples=100, deadline=None)
def test_masks_along_a_draft_are_those_of_going_there(
    tokenizers_by_dialect: dict[str, Tokenizer],
    name: str,
    rules: ReplyRules,
    seed: int,
    num_before: int,
    num_drafts: int,
    wrong_at: int | None,
):
    tokenizer = tokenizers_by_dialect[name]
    grammar = reply_grammar(find_dialect(tokenizer), rules)
    if grammar is None:
        return
    compiler = GrammarCompiler(tokenizer.json_text, tokenizer.vocab_size, tokenizer.eos_token_ids)
    going, looking = compiler.compile_lark(grammar), compiler.compile_lark(grammar)
    choose = random.Random(seed)

    def next_token() -> int | None:
        """A token that is allowed and does not end the output; markers are preferred now and then."""
        allowed = [token_id for token_id in allowed_ids(going) if token_id not in tokenizer.eos_token_ids]
        late = [token_id for token_id in allowed if token_id < 3 or token_id >= 512]
        return choose.choice(late if late and choose.random() < 0.3 else allowed) if allowed else None

    for _ in range(num_before):
        token_id = next_token()
        if going.is_complete or token_id is None:
            return
        looking.forced_text()
        going.accept(token_id)
        looking.accept(token_id)
    if going.is_complete:
        return
    masks, draft = [going.allowed_mask()], []
    while len(draft) < num_drafts and (token_id := next_token()) is not None:
        going.accept(token_id)
        if going.is_complete:
            draft.append(token_id)  # it is not to be verified: the model's own choice completes the output
            break
        draft.append(token_id)
        masks.append(going.allowed_mask())
    expected = tuple(draft[: len(masks) - 1])
    if wrong_at is not None and wrong_at < len(expected):
        forbidden = np.flatnonzero(np.unpackbits(masks[wrong_at].view(np.uint8), bitorder="little") == 0)
        draft[wrong_at] = int(choose.choice([i for i in forbidden.tolist() if i < tokenizer.vocab_size]))
        expected = expected[:wrong_at]
    assert looking.allowed_part(draft) == expected
    for mask, seen in zip(masks, looking.masks_along(expected), strict=False):
        assert np.array_equal(mask, seen)
    assert np.array_equal(looking.allowed_mask(), masks[0])
    assert looking.allowed_part(draft) == expected
    assert not looking.is_complete
