import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.grammar import GrammarCompiler, GrammarMatcher
from dayshift.engine.tokenizer import Tokenizer

VOCAB_SIZE = 541  # more columns than the tokenizer has tokens (512), and no multiple of 32
SCHEMA = {
    "type": "object",
    "properties": {
        "action": {"enum": ["execute", "give_up"]},
        "steps": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 12}, "maxItems": 3},
        "sure": {"type": "boolean"},
    },
    "required": ["action", "steps", "sure"],
    "additionalProperties": False,
}


# Valid, and more at once than the library follows: any of 60 objects, each with 30 properties.
TOO_LARGE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": f"k{i}"}} | {f"p{j}": {"type": "string"} for j in range(30)},
        }
        for i in range(60)
    ]
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.json_text, VOCAB_SIZE, tokenizer.eos_token_ids)


def allowed_ids(matcher: GrammarMatcher) -> list[int]:
    mask = matcher.allowed_mask()
    assert mask.dtype == np.int32
    return [i for i in range(len(mask) * 32) if int(mask[i // 32]) >> (i % 32) & 1]


@given(seed=st.integers(0, 2**32))
def test_any_walk_through_the_masks_ends_in_compact_json_of_the_schema(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int
):
    choose = random.Random(seed).choice
    matcher = compiler.compile(SCHEMA)
    token_ids = []
    while not matcher.is_complete:
        allowed = allowed_ids(matcher)
        assert max(allowed) < tokenizer.vocab_size
        token_ids.append(choose(allowed))
        matcher.accept(token_ids[-1])

    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    value = json.loads(text)
    assert text == json.dumps(value, separators=(",", ":"))
    assert list(value) == ["action", "steps", "sure"]
    assert value["action"] in ("execute", "give_up")
    assert isinstance(value["sure"], bool)
    assert len(value["steps"]) <= 3
    assert all(1 <= step <= 12 for step in value["steps"])


def test_matchers_of_one_schema_are_independent(compiler: GrammarCompiler, tokenizer: Tokenizer):
    first, second = compiler.compile(SCHEMA), compiler.compile(SCHEMA)
    before = allowed_ids(second)
    for token_id in tokenizer.encode('{"action":"execute","steps":[1,12],"sure":true}'):
        first.accept(token_id)
    assert first.is_complete
    assert not second.is_complete
    assert allowed_ids(second) == before


def test_a_value_that_could_go_on_is_complete_after_eos(compiler: GrammarCompiler, tokenizer: Tokenizer):
    matcher = compiler.compile({"type": "integer"})
    matcher.accept(tokenizer.encode("7")[0])
    assert not matcher.is_complete
    assert tokenizer.eos_token_ids <= set(allowed_ids(matcher))
    matcher.accept(max(tokenizer.eos_token_ids))
    assert matcher.is_complete


def test_a_token_outside_the_grammar_is_refused_in_one_line(compiler: GrammarCompiler, tokenizer: Tokenizer):
    matcher = compiler.compile(SCHEMA)
    with pytest.raises(EngineError, match=r"json_schema: .*satisfy the grammar") as caught:
        matcher.accept(tokenizer.encode("a")[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objct"}, "Invalid type: objct"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "Unsatisfiable"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, "Unimplemented keys"),
        ({"$ref": "http://localhost/schema.json"}, "does not fetch"),
        ({"$ref": "#"}, "json_schema: "),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "json_schema: "),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_in_one_line(
    compiler: GrammarCompiler, schema: dict[str, object], reason: str
):
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        compiler.compile(schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grammar", ["start: start", "start: a\na: b\nb: a", "start: a\na: a a"])
def test_a_grammar_that_goes_round_in_circles_is_refused(compiler: GrammarCompiler, grammar: str):
    with pytest.raises(InvalidRequestError, match="grammar: ") as caught:
        compiler.compile_lark(grammar)
    assert "\n" not in str(caught.value)


def walk(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> None:
    for token_id in tokenizer.encode(text):
        matcher.allowed_mask()
        matcher.accept(token_id)


def test_a_grammar_that_gets_too_large_on_the_way_fails_for_good(
    compiler: GrammarCompiler, tokenizer: Tokenizer
):
    matcher = compiler.compile(TOO_LARGE)
    matcher.check()
    with pytest.raises(InvalidRequestError, match=r"json_schema: .*max is 2000"):
        walk(matcher, tokenizer, '{"p0":"a","p1":"b"}')
    assert (matcher.allowed_mask() == -1).all()  # others wait for the masks of a step
    for action in (matcher.check, lambda: matcher.accept(0)):
        with pytest.raises(InvalidRequestError, match="max is 2000"):
            action()


def test_a_refusal_is_the_reason_and_no_more(compiler: GrammarCompiler):
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile({"type": "objct"})
    assert str(caught.value) == "json_schema: Invalid type: objct"


def test_a_model_without_eos_is_refused(tokenizer: Tokenizer):
    with pytest.raises(InvalidRequestError, match="no eos token"):
        GrammarCompiler(tokenizer.json_text, VOCAB_SIZE, ())


@given(
    action=st.sampled_from(["execute", "give_up"]),
    steps=st.lists(st.integers(1, 12), max_size=3),
    sure=st.booleans(),
)
def test_the_tokens_that_a_valid_reply_is_encoded_to_are_allowed(
    compiler: GrammarCompiler, tokenizer: Tokenizer, action: str, steps: list[int], sure: bool
):
    text = json.dumps({"action": action, "steps": steps, "sure": sure}, separators=(",", ":"))
    matcher = compiler.compile(SCHEMA)
    token_ids = tokenizer.encode(text)
    assert len(token_ids) < len(text), "some tokens merge several characters"
    for token_id in token_ids:
        assert token_id in allowed_ids(matcher)
        matcher.accept(token_id)
    assert matcher.is_complete
