"""/v1/responses and /v1/conversations through the official client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.api import InvalidRequestError, Message, SessionConfig, ToolCall
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.errors import ParameterError
from dayshift.engine.server.response_store import Conversation, ResponseStore, StoredResponse
from dayshift.engine.server.run import ServerOptions, running_server
from tests.engine.dialect_models import make_dialect_model

TOOL = {
    "type": "function",
    "name": "move",
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["shelf", "böx"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]} | {
    "additionalProperties": False
}


@pytest.fixture(scope="module")
def qwen_config(
    make_tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> EngineConfig:
    folder = make_dialect_model(make_tiny_model, "qwen")
    store = tmp_path_factory.mktemp("store")
    return EngineConfig(model=str(folder), kv_cache_bytes=16 << 20, window=2048, store_dir=store)


@pytest.fixture(scope="module")
def url(qwen_config: EngineConfig) -> Iterator[str]:
    with running_server(qwen_config, ServerOptions(port=0, model_name="tiny", in_process=True)) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def sessions(url: str) -> Iterator[Callable[[], list[Any]]]:
    with DayshiftClient(url) as client:
        yield client.sessions


def respond(api: Any, question: Any = "Shift 1?", **fields: Any) -> Any:
    return api.responses.create(
        model="tiny", input=question, **({"max_output_tokens": 12, "temperature": 0} | fields)
    )


def turns_ending_with(sessions: Any, response: Any) -> list[Any] | None:
    found = (s.turns for s in sessions() if s.turns and s.turns[-1].request_id == response.id)
    return next(found, None)


def test_a_response_is_what_a_chat_would_be(api: Any):
    fields = {"max_output_tokens": 20, "instructions": "be brief"}
    response = respond(api, **fields)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Shift 1?"}]
    chat = api.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=20)
    assert response.output_text == (chat.choices[0].message.content or "")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    is_cut = chat.choices[0].finish_reason == "length"
    assert response.status == ("incomplete" if is_cut else "completed")
    assert (response.incomplete_details is not None) == is_cut
    stateless = respond(api, store=False, **fields)
    assert stateless.output_text == response.output_text
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(stateless.id)


def test_the_next_response_sends_the_session_its_new_turn_only(api: Any, sessions: Any):
    first = respond(api, "one", instructions="be brief")
    second = respond(api, "two", instructions="be brief", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    session = next(s for s in sessions() if s.turns and s.turns[-1].request_id == second.id)
    assert [turn.request_id for turn in session.turns] == [first.id, second.id]
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_an_older_response_and_other_instructions_begin_a_branch(api: Any, sessions: Any):
    first = respond(api, "one", instructions="be brief")
    second = respond(api, "two", instructions="be brief", previous_response_id=first.id)
    again = respond(api, "two again", instructions="be brief", previous_response_id=first.id)
    other = respond(api, "two too", instructions="be very very long", previous_response_id=first.id)
    third = respond(api, "three", instructions="be brief", previous_response_id=second.id)
    by_end = {session.turns[-1].request_id: session for session in sessions() if session.turns}
    assert second.id not in by_end
    said = {
        end: [turn.text.splitlines()[0] for turn in by_end[end].turns]
        for end in (again.id, other.id, third.id)
    }
    assert said == {
        again.id: ["user: one", "user: two again"],
        other.id: ["user: one", "user: two too"],
        third.id: ["user: one", "user: two", "user: three"],
    }
    assert first.output_text in by_end[again.id].turns[0].text
    assert by_end[other.id].num_system_tokens != by_end[third.id].num_system_tokens


def test_two_calls_at_once_from_one_response_are_two_branches(api: Any, sessions: Any):
    first = respond(api, "one")
    with respond(api, "two", previous_response_id=first.id, max_output_tokens=400, stream=True) as slow:
        begun = next(iter(slow))
        other = respond(api, "two too", previous_response_id=first.id)
        *_, last = slow
    assert begun.response.id == last.response.id
    for response, past in ((other, None), (last.response, first.id)):
        turns = turns_ending_with(sessions, response)
        assert turns is not None
        assert [turn.request_id for turn in turns] == [past, response.id]


def test_responses_are_retrieved_and_deleted_with_their_sessions(api: Any, sessions: Any):
    before = len(sessions())
    first = respond(api, "one", metadata={"robot": "r1"})
    second = respond(api, "two", previous_response_id=first.id)
    assert len(sessions()) == before + 1
    found = api.responses.retrieve(first.id)
    assert found.output_text == first.output_text
    assert found.metadata == {"robot": "r1"}
    assert api.responses.retrieve(first.id, stream=False).id == first.id
    with pytest.raises(openai.BadRequestError, match="stream: this query parameter is not supported"):
        api.responses.retrieve(first.id, stream=True)
    api.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        respond(api, "two again", previous_response_id=first.id)
    assert len(sessions()) == before  # it had what is to be forgotten
    third = respond(api, "three", previous_response_id=second.id)
    turns = turns_ending_with(sessions, third) or []
    assert [turn.text.splitlines()[0] for turn in turns] == ["user: two", "user: three"]
    with pytest.raises(openai.NotFoundError):
        api.responses.delete(first.id)


def test_a_conversation_goes_on_without_what_was_deleted(api: Any, sessions: Any):
    conversation = api.conversations.create()
    first, second, third = (respond(api, text, conversation=conversation.id) for text in ("1", "2", "3"))
    api.responses.delete(second.id)
    api.responses.delete(third.id)
    fourth = respond(api, "4", conversation=conversation.id)
    turns = turns_ending_with(sessions, fourth) or []
    assert [turn.text.splitlines()[0] for turn in turns] == ["user: 1", "user: 4"]
    api.responses.delete(first.id)
    fifth = respond(api, "5", conversation=conversation.id)
    assert [turn.text.splitlines()[0] for turn in turns_ending_with(sessions, fifth) or []] == [
        "user: 4",
        "user: 5",
    ]


def test_what_a_tool_returned_goes_with_the_call_that_is_deleted(api: Any, sessions: Any):
    fields = {"tools": [TOOL], "max_output_tokens": 80}
    first = respond(api, "go", tool_choice="required", parallel_tool_calls=False, **fields)
    second = respond(api, result_of(called(first)), previous_response_id=first.id, **fields)
    api.responses.delete(first.id)
    third = respond(api, "on", previous_response_id=second.id, **fields)
    texts = [turn.text for turn in turns_ending_with(sessions, third) or []]
    assert not any("at the shelf" in text for text in texts)
    assert third.status in ("completed", "incomplete")


def test_a_conversation_is_a_session(api: Any, sessions: Any):
    conversation = api.conversations.create(
        items=[{"role": "user", "content": "My name is Ö."}, {"role": "assistant", "content": "Hello Ö."}],
        metadata={"topic": "x"},
    )
    assert api.conversations.retrieve(conversation.id).metadata == {"topic": "x"}
    for text in ("one", "two"):
        response = respond(api, text, conversation=conversation.id)
        assert response.conversation.id == conversation.id
    session = next(s for s in sessions() if s.turns and s.turns[-1].request_id == response.id)
    assert len(session.turns) == 3
    assert "Hello Ö." in session.turns[0].text
    before = len(sessions())
    assert api.conversations.delete(conversation.id).deleted
    assert len(sessions()) == before - 1
    with pytest.raises(openai.NotFoundError):
        api.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        respond(api, "three", conversation=conversation.id)


def test_a_tool_call_survives_from_response_to_response(api: Any):
    fields = {"tools": [TOOL], "max_output_tokens": 60, "reasoning": {"effort": "none"}}
    first = respond(api, "go", tool_choice="required", parallel_tool_calls=False, **fields)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["to"] in ("shelf", "böx")
    assert first.status == "completed"
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "at the shelf"}
    second = respond(api, [output], previous_response_id=first.id, **fields)
    assert second.usage.input_tokens > first.usage.input_tokens + 10
    items = [{"role": "user", "content": "go"}, call.model_dump(exclude_none=True), output]
    resent = respond(api, items, store=False, **fields)
    assert resent.usage.input_tokens == second.usage.input_tokens
    assert resent.output_text == second.output_text


STOP = {
    "type": "function",
    "name": "stop",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


def called(response: Any) -> Any:
    (call,) = [item for item in response.output if item.type == "function_call"]
    return call


def result_of(call: Any) -> list[dict[str, str]]:
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "at the shelf"}]


def test_responses_with_tools_are_turns_of_a_session(api: Any, sessions: Any):
    fields = {"tools": [TOOL], "max_output_tokens": 80, "instructions": "be brief"}
    must = {"tool_choice": "required", "parallel_tool_calls": False, "reasoning": {"effort": "minimal"}}
    first = respond(api, "go", **fields, **must)
    call = called(first)
    second = respond(api, result_of(call), previous_response_id=first.id, **fields)
    turns = turns_ending_with(sessions, second)
    assert turns is not None
    assert [turn.request_id for turn in turns] == [first.id, second.id]
    assert call.arguments in turns[0].text
    assert turns[1].text.startswith("tool: at the shelf")
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    # What the session's context begins with is what the template makes of the tools.
    items = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    chat = {"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}
    whole = api.chat.completions.create(model="tiny", messages=items, tools=[chat], max_tokens=1)
    assert first.usage.input_tokens == whole.usage.prompt_tokens
    third = respond(api, "and on", previous_response_id=second.id, **fields)
    assert len(turns_ending_with(sessions, third) or ()) == 3


def test_other_tools_begin_another_session_with_the_same_past(api: Any, sessions: Any):
    must = {"tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 80}
    first = respond(api, "go", tools=[TOOL], **must)
    second = respond(api, result_of(called(first)), tools=[TOOL], previous_response_id=first.id)
    other = respond(api, "stop", tools=[TOOL, STOP], previous_response_id=second.id)
    turns = turns_ending_with(sessions, other)
    assert turns is not None
    assert [turn.request_id for turn in turns] == [None, None, other.id]
    assert turns_ending_with(sessions, second) is not None
    assert "at the shelf" in turns[1].text


def test_what_a_session_cannot_take_is_answered_without_one(api: Any, sessions: Any):
    """Tools that the model must not know of, reasoning that the prompt switches off, a call sent again."""
    first = respond(api, "go", tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    before = len(sessions())
    hidden = respond(api, "go", tools=[TOOL], tool_choice="none")
    silent = respond(api, "go", reasoning={"effort": "none"})
    for response in (hidden, silent):
        assert turns_ending_with(sessions, response) is None
        assert api.responses.retrieve(response.id).output_text == response.output_text
    assert len(sessions()) == before
    assert turns_ending_with(sessions, first) is not None


requests = st.fixed_dictionaries(
    {
        "max_output_tokens": st.integers(1, 60),
        "tool_choice": st.sampled_from([None, "auto", "required", {"type": "function", "name": "move"}]),
        "text": st.sampled_from(
            [None, {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}]
        ),
        "reasoning": st.sampled_from([None, {"effort": "none"}, {"effort": "minimal"}]),
        "store": st.booleans(),
        "input": st.text(min_size=1, max_size=5),
    }
)


@given(requests)
@settings(max_examples=20, deadline=None)
def test_a_streamed_response_is_the_whole_response(api: Any, drawn: dict):
    fields = {name: value for name, value in drawn.items() if value is not None}
    question = fields.pop("input")
    if "tool_choice" in fields:
        fields["tools"] = [TOOL]
    whole = respond(api, question, **fields)
    events = list(respond(api, question, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type == f"response.{whole.status}"

    def facts(response: Any) -> list[Any]:
        return [
            {k: v for k, v in item.model_dump().items() if k not in ("id", "call_id")}
            for item in response.output
        ]

    assert facts(last.response) == facts(whole)
    assert last.response.usage == whole.usage
    for index, item in enumerate(last.response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        assert own[0].type == "response.output_item.added"
        assert own[-1].type == "response.output_item.done"
        assert own[-1].item == item
        pieces = "".join(event.delta for event in own if event.type.endswith(".delta"))
        whole_text = item.arguments if item.type == "function_call" else item.content[0].text
        assert pieces == whole_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "content": []}]}, "input"),
        ({"input": [{"type": "banana"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "disabled"}, "truncation"),
        ({"include": ["x"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"previous_response_id": "a", "conversation": "b"}, "conversation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "description": "x"}}}, "text.format.description"),
    ],
)
def test_a_wrong_field_is_named(url: str, fields: dict, param: str):
    response = httpx.post(f"{url}/v1/responses", json={"input": "x"} | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_an_error_is_one_line_whatever_it_quotes(url: str):
    response = httpx.post(f"{url}/v1/responses", json={"input": "x", "previous_response_id": "a\nb"})
    assert response.status_code == 400
    assert "\n" not in response.json()["error"]["message"]


def test_a_refused_response_leaves_no_session(api: Any, sessions: Any):
    before = len(sessions())
    with pytest.raises(openai.BadRequestError):
        respond(api, "x", max_output_tokens=10**6)
    assert len(sessions()) == before


def test_a_session_is_as_long_as_the_engine_can_hold(
    qwen_config: EngineConfig, caplog: pytest.LogCaptureFixture
):
    """Where that is less than the usual window; one that asks for more is refused."""
    config = EngineConfig(model=qwen_config.model, num_kv_blocks=20)
    with (
        running_server(config, ServerOptions(port=0, model_name="tiny", in_process=True)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
        DayshiftClient(url) as dayshift,
    ):
        (said,) = [r.getMessage() for r in caplog.records if "window" in r.getMessage()]
        assert respond(client, "one").status in ("incomplete", "completed")
        (session,) = dayshift.sessions()
        assert said.startswith(f"sessions have a window of {session.window} tokens unless they say, not 8192")
        with pytest.raises(InvalidRequestError, match="that this engine can hold for one session"):
            dayshift.open_session(SessionConfig(window=8192))


def test_responses_outlive_the_server(qwen_config: EngineConfig, tmp_path: Path):
    config = EngineConfig(
        model=qwen_config.model, kv_cache_bytes=16 << 20, window=2048, store_dir=tmp_path / "store"
    )
    options = ServerOptions(port=0, model_name="tiny", in_process=True)
    with (
        running_server(config, options) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client,
    ):
        first = respond(client, "one")
    with (
        running_server(config, options) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client,
        DayshiftClient(url) as dayshift,
    ):
        assert client.responses.retrieve(first.id).output_text == first.output_text
        second = respond(client, "two", previous_response_id=first.id)
        (session,) = dayshift.sessions()
        assert [turn.request_id for turn in session.turns] == [first.id, second.id]


@pytest.mark.parametrize("window", [64, 600, 2048])
def test_without_a_limit_a_reply_has_the_room_that_its_session_leaves(qwen_config, window: int) -> None:
    config = replace(qwen_config, store_dir=None, window=window)
    with running_server(config, ServerOptions(port=0, in_process=True)) as url:
        previous_id = None
        for question in ("Shift 1?", "And shift 2?"):
            body = {"input": question, "instructions": "Lead.", "previous_response_id": previous_id}
            reply = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
            assert reply.is_success, reply.text
            previous_id = reply.json()["id"]
        (session,) = httpx.get(f"{url}/v1/sessions").json()["sessions"]
        assert len(session["turns"]) == 2


def stored(number: int, previous: str | None = None, session_id: str | None = None) -> StoredResponse:
    return StoredResponse(
        response_id=f"r{number}",
        previous_id=previous,
        conversation_id=None,
        session_id=session_id,
        instructions="be brief",
        messages=(Message("user", "ö"), Message("assistant", "", (ToolCall("c", "f", "{}"),))),
        body={"id": f"r{number}"},
    )


def test_the_store_keeps_what_it_was_given_and_is_bounded(tmp_path: Path):
    path = tmp_path / "new folder" / "responses.sqlite"
    store = ResponseStore(path, max_responses=3)
    store.add_conversation(
        Conversation(conversation_id="c", created_at=5, metadata={"a": "b"}, last_response_id=None)
    )
    assert store.add(stored(0, session_id="s0")) == set()
    assert store.add(stored(1, "r0", session_id="s0")) == set()
    store.close()
    store = ResponseStore(path, max_responses=3)
    assert store.find("r1") == stored(1, "r0", session_id="s0")
    assert len(store.past(stored(1, "r0"))) == 2
    found = store.find_conversation("c")
    assert found is not None
    assert found.metadata == {"a": "b"}
    store.add(stored(2))
    assert store.add(stored(3)) == set(), "r1 still leads to the session"
    assert store.add(stored(4)) == {"s0"}
    assert store.find("r1") is None
    with pytest.raises(ParameterError, match="r0, which came before it, is kept no longer"):
        store.past(stored(1, "r0"))
    store.close()
