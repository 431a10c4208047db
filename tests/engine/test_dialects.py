"""Grammars and parsers of the dialects: random replies that a grammar allows, cut anywhere, are read the
same, and hold what was asked for."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.api import InvalidRequestError, Message, ToolCall
from dayshift.engine.dialects import (
    ContentText,
    Dialect,
    ReasoningFormat,
    ReasoningRules,
    ReasoningText,
    ReplyEvent,
    ReplyRules,
    Tool,
    ToolCallArguments,
    ToolCallBegin,
    ToolFormat,
    find_dialect,
    make_parser,
    reply_grammar,
)
from dayshift.engine.grammar import GrammarCompiler
from dayshift.engine.tokenizer import Tokenizer
from tests.engine.dialect_models import DIALECTS, make_dialect_model

MOVE = {
    "type": "object",
    "properties": {"to": {"enum": ["shelf", "böx {1}"]}, "fast": {"type": "boolean"}},
    "required": ["to", "fast"],
    "additionalProperties": False,
}
TOOLS = (Tool("move", MOVE, is_strict=True), Tool("stop"), Tool("say", {"type": "object", "format": "odd"}))
ANSWER = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@dataclass
class Read:
    """A reply as its events add up."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)


def read(events: Iterable[ReplyEvent]) -> Read:
    reply = Read()
    for event in events:
        match event:
            case ReasoningText(text):
                reply.reasoning += text
            case ContentText(text):
                reply.content += text
            case ToolCallBegin(index, name):
                assert index == len(reply.calls)
                reply.calls.append((name, ""))
            case ToolCallArguments(index, text):
                name, arguments = reply.calls[index]
                reply.calls[index] = (name, arguments + text)
    return reply


def parsed(dialect: Dialect, rules: ReplyRules, pieces: Iterable[str]) -> Read:
    parser = make_parser(dialect, rules)
    events = [event for piece in pieces for event in parser.push(piece)]
    return read([*events, *parser.finish()])


@pytest.fixture(scope="module")
def tokenizers_by_dialect(make_tiny_model: Callable[..., Path]) -> dict[str, Tokenizer]:
    return {name: Tokenizer(make_dialect_model(make_tiny_model, name)) for name in DIALECTS}


def random_reply(tokenizer: Tokenizer, grammar: str, seed: int, max_tokens: int) -> tuple[str, bool]:
    """A reply that the grammar allows, and whether it is whole. Markers and ends are preferred now and
    then, or free text would hardly ever end."""
    choose = random.Random(seed)
    matcher = GrammarCompiler(
        tokenizer.json_text, tokenizer.vocab_size, tokenizer.eos_token_ids
    ).compile_lark(grammar)
    token_ids: list[int] = []
    while len(token_ids) < max_tokens:
        bits = np.unpackbits(matcher.allowed_mask().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        late = [token_id for token_id in allowed if token_id < 3 or token_id >= 512]
        token_id = choose.choice(late if late and choose.random() < 0.2 else allowed)
        if token_id in tokenizer.eos_token_ids:
            break
        matcher.accept(token_id)
        token_ids.append(token_id)
        if matcher.is_complete:
            break
    else:
        return tokenizer.decode(token_ids, skip_special_tokens=False), False
    return tokenizer.decode(token_ids, skip_special_tokens=False), True


rules_of_replies = st.builds(
    ReplyRules,
    tools=st.sampled_from([(), TOOLS[:1], TOOLS]),
    tool_choice=st.sampled_from(["none", "auto", "required"]),
    is_parallel=st.booleans(),
    schema=st.sampled_from([None, ANSWER]),
    reasoning=st.builds(
        ReasoningRules,
        is_on=st.booleans(),
        starts_inside=st.booleans(),
        budget=st.sampled_from([None, 1, 5]),
    ),
).filter(lambda rules: bool(rules.tools) or rules.tool_choice == "none")


@given(name=st.sampled_from(DIALECTS), rules=rules_of_replies, seed=st.integers(0, 2**32), data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_reply_is_valid_and_is_read_the_same_wherever_it_is_cut(
    tokenizers_by_dialect: dict[str, Tokenizer],
    name: str,
    rules: ReplyRules,
    seed: int,
    data: st.DataObject,
):
    tokenizer = tokenizers_by_dialect[name]
    dialect = find_dialect(tokenizer)
    grammar = reply_grammar(dialect, rules)
    if grammar is None:
        assert rules.schema is None
        assert not rules.callable_tools
        return
    text, is_whole = random_reply(tokenizer, grammar, seed, max_tokens=80)
    whole = parsed(dialect, rules, [text])
    assert parsed(dialect, rules, list(text)) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(dialect, rules, pieces) == whole

    markers = {marker for marker in dialect.marker_ids if marker not in ("<|python_tag|>",)}
    for part in (whole.reasoning, whole.content, *(arguments for _, arguments in whole.calls)):
        assert not any(marker in part for marker in markers), "no marker leaks into the texts"
    if not is_whole:
        return
    for tool, arguments in whole.calls:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        if tool == "move":
            jsonschema.validate(value, MOVE)
        assert tool in {t.name for t in rules.callable_tools}
    if rules.tool_choice == "required":
        assert whole.calls
        assert not whole.content
    if not rules.is_parallel or dialect.tools is not ToolFormat.HERMES:
        assert len(whole.calls) <= 1
    if rules.schema is not None and not whole.calls:
        jsonschema.validate(json.loads(whole.content), ANSWER)


@given(name=st.sampled_from(DIALECTS), text=st.text(alphabet='<>|/tool_callthinkmessage{}" :ü', max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_the_same_wherever_it_is_cut(
    tokenizers_by_dialect: dict[str, Tokenizer], name: str, text: str
):
    """Also what no grammar allowed, with markers spelled out."""
    dialect = find_dialect(tokenizers_by_dialect[name])
    rules = ReplyRules(tools=TOOLS, tool_choice="auto", reasoning=ReasoningRules(is_on=True))
    assert parsed(dialect, rules, list(text)) == parsed(dialect, rules, [text])


def test_dialects_are_found_by_template_and_tokens(tokenizers_by_dialect: dict[str, Tokenizer]):
    found = {name: find_dialect(tokenizer) for name, tokenizer in tokenizers_by_dialect.items()}
    kinds = {name: (dialect.tools, dialect.reasoning) for name, dialect in found.items()}
    assert kinds == {
        "qwen": (ToolFormat.HERMES, ReasoningFormat.THINK),
        "hermes_text": (ToolFormat.HERMES, None),
        "llama": (ToolFormat.LLAMA3, None),
        "harmony": (ToolFormat.HARMONY, ReasoningFormat.HARMONY),
    }
    assert found["qwen"].can_skip_reasoning
    assert not found["harmony"].can_skip_reasoning


def test_a_model_without_tools_in_its_template_has_none(tiny_model_dir: Path):
    dialect = find_dialect(Tokenizer(tiny_model_dir))
    assert dialect.tools is None
    assert dialect.reasoning is None


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "qwen",
            '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "say", "arguments": {"x": "}\\"{"}}\n'
            '</tool_call>\n<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
            Read("hm", "I look.", [("say", '{"x": "}\\"{"}'), ("stop", "{}")]),
        ),
        ("qwen", "no <tool_cal> here \n", Read("", "no <tool_cal> here \n")),
        ("qwen", '<tool_call>\n{"name": "mo', Read()),
        (
            "qwen",
            '<tool_call>\n{"name": "move", "arguments": {"to": "sh',
            Read(calls=[("move", '{"to": "sh')]),
        ),
        ("llama", '{"name": "move", "parameters": {"to": 1}}', Read(calls=[("move", '{"to": 1}')])),
        ("llama", '<|python_tag|>{"name": "stop", "parameters": {}}', Read(calls=[("stop", "{}")])),
        ("llama", '{"name": "other", "parameters": {}}', Read("", '{"name": "other", "parameters": {}}')),
        ("llama", '{"name": "a"}', Read("", '{"name": "a"}')),
        (
            "harmony",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>analysis<|message|>so<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
            "<|channel|>commentary to=functions.move <|constrain|>json<|message|>{}",
            Read("hm\nso", "I look.", [("move", "{}")]),
        ),
        (
            "harmony",
            ' to=functions.stop<|channel|>commentary json<|message|>{"a',
            Read(calls=[("stop", '{"a')]),
        ),
        ("harmony", "<|channel|>final<|message|>yes<|return|>", Read("", "yes")),
        ("harmony", "<|channel|>fin", Read()),
    ],
)
def test_replies_as_the_families_write_them(
    tokenizers_by_dialect: dict[str, Tokenizer], name: str, text: str, expected: Read
):
    rules = ReplyRules(tools=TOOLS, tool_choice="auto", reasoning=ReasoningRules(is_on=True))
    dialect = find_dialect(tokenizers_by_dialect[name])
    assert parsed(dialect, rules, [text]) == expected
    assert parsed(dialect, rules, list(text)) == expected


def test_a_strict_tool_with_a_keyword_that_cannot_be_enforced_is_refused(
    tokenizers_by_dialect: dict[str, Tokenizer],
):
    tokenizer = tokenizers_by_dialect["qwen"]
    compiler = GrammarCompiler(tokenizer.json_text, tokenizer.vocab_size, tokenizer.eos_token_ids)
    parameters = {"type": "object", "not": {"type": "string"}}
    for is_strict in (False, True):
        rules = ReplyRules(tools=(Tool("f", parameters, is_strict),), tool_choice="auto")
        grammar = reply_grammar(find_dialect(tokenizer), rules)
        assert grammar is not None
        if is_strict:
            with pytest.raises(InvalidRequestError, match="Unimplemented keys"):
                compiler.compile_lark(grammar)
        else:
            compiler.compile_lark(grammar)


def test_a_reasoning_budget_is_kept(tokenizers_by_dialect: dict[str, Tokenizer]):
    for name in ("qwen", "harmony"):
        tokenizer = tokenizers_by_dialect[name]
        dialect = find_dialect(tokenizer)
        rules = ReplyRules(reasoning=ReasoningRules(is_on=True, budget=6))
        grammar = reply_grammar(dialect, rules)
        assert grammar is not None
        lengths = []
        for seed in range(30):
            text, _ = random_reply(tokenizer, grammar, seed, max_tokens=60)
            reasoning = parsed(dialect, rules, [text]).reasoning
            lengths.append(len(tokenizer.encode(reasoning)))
        assert 0 < max(lengths) <= 8, "as it was generated; encoded again, it may be a little more"


@pytest.mark.parametrize("name", DIALECTS)
def test_tools_and_calls_are_in_the_prompt(tokenizers_by_dialect: dict[str, Tokenizer], name: str):
    call = ToolCall("c1", "move", '{"to": "shelf"}')
    messages = [
        Message("user", "go"),
        Message("assistant", "", tool_calls=(call,)),
        Message("tool", "done", tool_call_id="c1"),
    ]
    tool = {"type": "function", "function": {"name": "move", "parameters": MOVE}}
    text = tokenizers_by_dialect[name].render_chat(messages, tools=[tool])
    assert '"böx {1}"' in text
    assert '{"to": "shelf"}' in text
    assert "done" in text
