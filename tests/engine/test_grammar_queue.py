"""Grammars that cannot be compiled in time are refused, and nobody waits for another's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayshift.engine import Engine
from dayshift.engine.action_scheduler import ActionScheduler
from dayshift.engine.api import GenerateRequest, InvalidRequestError, SamplingParams
from dayshift.engine.config import EngineConfig
from dayshift.engine.core_messages import (
    Answer,
    Cancel,
    Chunks,
    FromCore,
    Refusal,
    Shutdown,
    SubmitGenerate,
    ToCore,
)
from dayshift.engine.core_process import serve_requests
from dayshift.engine.grammar_queue import GrammarQueue
from dayshift.engine.grammar_sandbox import Model
from dayshift.engine.tokenizer import Tokenizer
from tests.engine.driving import joined

# Sums of all its divisors' remainders are followed at once: some 700,000 states, 20 seconds.
ENDLESS: dict[str, Any] = {"allOf": [{"type": "integer", "multipleOf": number} for number in (97, 89, 83)]}
SMALL = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}


def of_schema(schema: dict[str, Any]) -> SamplingParams:
    return SamplingParams(json_schema=schema, max_tokens=40)


def chain_of_rules(length: int) -> SamplingParams:
    """Each names the next: the library goes as deep, and overflows its stack."""
    rules = "".join(f'r{i}: "a" r{i + 1} | r{i + 1}\n' for i in range(length))
    return SamplingParams(grammar=f'start: r0\n{rules}r{length}: "z"')


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path) -> Model:
    tokenizer = Tokenizer(tiny_model_dir)
    return Model(tokenizer.json_text, tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))


@pytest.fixture(scope="module")
def grammars(model: Model) -> Iterator[GrammarQueue]:
    queue = GrammarQueue(model)
    yield queue
    queue.close()


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (of_schema(ENDLESS), "json_schema: it takes too long to compile"),
        (of_schema({"multipleOf": 999_983}), "json_schema: it takes too long to compile"),
        (SamplingParams(grammar=f"start: /{'a?' * 40_000}/"), "grammar: it takes too long to compile"),
        (chain_of_rules(8_000), "grammar: it is too large to compile"),
        (of_schema({"const": "x" * 300_000}), "json_schema: .* characters; at most 262144 are compiled"),
        (of_schema({"type": "objct"}), "^json_schema: Invalid type: objct$"),
    ],
    ids=["states", "multiple", "regex", "stack", "text", "wrong"],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    grammars: GrammarQueue, sampling: SamplingParams, reason: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidRequestError, match=reason) as caught:
            grammars.matcher(sampling)
        assert len(str(caught.value)) < 400
        assert "\n" not in str(caught.value)
    assert grammars.matcher(of_schema(SMALL)).forced_text() == '{"ok":'  # the helper is there again


def test_a_deep_schema_is_refused_and_a_long_chain_within_the_stack_is_not(grammars: GrammarQueue) -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5_000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(InvalidRequestError, match="json_schema: it is nested too deeply"):
        grammars.matcher(of_schema(deep))
    matcher = grammars.matcher(chain_of_rules(800))
    assert (matcher.allowed_mask() != 0).any()


def test_a_grammar_is_compiled_once_and_its_matchers_are_independent(grammars: GrammarQueue) -> None:
    first = grammars.matcher(of_schema(SMALL))
    assert grammars.is_ready(of_schema(dict(SMALL)))
    first.accept(next(i for i in range(512) if first.allowed_part([i])))
    assert grammars.matcher(of_schema(SMALL)).forced_text() == '{"ok":'


def test_a_queue_that_is_closed_leaves_nothing_behind(model: Model) -> None:
    before, queue = set(threading.enumerate()), GrammarQueue(model)
    queue.matcher(of_schema(SMALL))
    helper = queue._sandbox._helper
    assert helper is not None
    queue.close()
    assert helper._process.returncode == 0
    assert set(threading.enumerate()) <= before


class TestingChannel:
    """The core's end of its link: calls at first, then what `next_message` says, before every step."""

    __test__ = False

    def __init__(self, first: list[ToCore]) -> None:
        self._first = first
        self.sent: list[FromCore] = []
        self.is_over = False

    def receive(self, *, wait_s: float | None) -> list[ToCore]:
        messages, self._first = self._first, []
        return [*messages, Shutdown()] if self.is_over else messages

    def send(self, message: FromCore) -> None:
        self.sent.append(message)
        self.is_over = self.is_over or (isinstance(message, Answer | Refusal) and message.call_id == 1)


def submit(call_id: int, **sampling: Any) -> SubmitGenerate:
    request = GenerateRequest(
        request_id=f"r{call_id}", prompt_token_ids=(5, 6), sampling=SamplingParams(**sampling)
    )
    return SubmitGenerate(call_id, request)


@pytest.fixture
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    engine = Engine(EngineConfig(model=str(tiny_model_dir), device="cpu", num_kv_blocks=64, restore="read"))
    yield engine
    engine.close()


def test_others_get_their_tokens_while_a_grammar_is_compiled(engine: Engine) -> None:
    plain = submit(2, max_tokens=20, ignore_eos=True)
    channel = TestingChannel([submit(1, json_schema=ENDLESS), plain, submit(3, json_schema=SMALL)])
    serve_requests(engine, ActionScheduler({}), channel)  # type: ignore[arg-type]
    chunks = [chunk for message in channel.sent if isinstance(message, Chunks) for chunk in message.chunks]
    assert len(joined(c for c in chunks if c.request_id == "r2").token_ids) == 20
    last = channel.sent[-1]
    refusals = [message for message in channel.sent if isinstance(message, Refusal)]
    assert [refusal.call_id for refusal in refusals] == [1]
    assert "takes too long to compile" in refusals[0].message
    assert last == refusals[0], "whoever waited for nothing was answered before"


def test_grammars_that_nobody_waits_for_are_not_compiled(engine: Engine) -> None:
    """Behind one that takes its time; another's that is the same is compiled."""
    given_up = [submit(number, json_schema={"const": number}) for number in range(2, 6)]
    cancels = [Cancel(call.request.request_id) for call in given_up]
    same = submit(6, json_schema={"const": 2})
    first: list[ToCore] = [submit(1, json_schema=ENDLESS), *given_up, same, *cancels]
    channel = TestingChannel(first)
    serve_requests(engine, ActionScheduler({}), channel)  # type: ignore[arg-type]
    grammars = engine.intake.grammars
    assert grammars.matcher(of_schema({"const": 2})).forced_text() == "2"
    assert [text for text, _ in grammars._outcomes if '"const": 2' in text]
    assert not [text for text, _ in grammars._outcomes if '"const": 3' in text]


def test_a_request_that_was_given_up_meanwhile_is_not_begun(engine: Engine) -> None:
    first: list[ToCore] = [submit(2, json_schema=SMALL), Cancel("r2"), submit(1, json_schema={"const": 1})]
    channel = TestingChannel(first)
    serve_requests(engine, ActionScheduler({}), channel)  # type: ignore[arg-type]
    assert [message.call_id for message in channel.sent if isinstance(message, Answer)] == [1]
    assert not [message for message in channel.sent if isinstance(message, Refusal)]
