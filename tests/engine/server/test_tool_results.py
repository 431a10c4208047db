"""Results of tools that belong to no call, and calls without a result, are refused as OpenAI refuses them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from dayshift.engine.api import Message, ToolCall
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.errors import ParameterError
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.server.tool_results import check_chat, check_input, open_calls
from tests.engine.dialect_models import make_dialect_model

USER, ANSWER = Message("user", "go"), Message("assistant", "done")


def calls(*call_ids: str) -> Message:
    return Message("assistant", "", tuple(ToolCall(call_id, "move", "{}") for call_id in call_ids))


def result(call_id: str | None) -> Message:
    return Message("tool", "ok", tool_call_id=call_id)


@pytest.mark.parametrize(
    "messages",
    [
        [USER, ANSWER, USER],
        [USER, calls("a"), result("a"), USER],
        [USER, calls("a", "b"), result("b"), result("a"), calls("a"), result("a")],
    ],
)
def test_a_chat_in_which_every_call_has_its_result_is_right(messages: list[Message]) -> None:
    check_chat(messages)
    check_input(messages, open_ids=(), may_lack=False)
    assert open_calls(messages) == []


@pytest.mark.parametrize(
    ("messages", "param", "reason"),
    [
        ([USER, result("a")], "messages.1.role", "must be a response to a preceding message with tool_calls"),
        ([USER, ANSWER, result("a")], "messages.2.role", "must be a response to a preceding message"),
        ([USER, calls("a"), result("b")], "messages.2.tool_call_id", "'b' not found in tool_calls"),
        ([USER, calls("a"), result(None)], "messages.2.tool_call_id", "must name the call"),
        ([USER, calls("a"), result("a"), result("a")], "messages.3.tool_call_id", "has a response already"),
        ([USER, calls("a")], "messages.1", "did not have response messages: a"),
        ([USER, calls("a", "b"), result("a"), USER], "messages.2", "did not have response messages: b"),
        ([USER, calls("a"), USER, result("a")], "messages.1", "did not have response messages: a"),
    ],
)
def test_a_chat_in_which_they_do_not_match_is_refused(
    messages: list[Message], param: str, reason: str
) -> None:
    with pytest.raises(ParameterError, match=reason) as caught:
        check_chat(messages)
    assert caught.value.param == param


def test_calls_before_an_input_are_answered_in_it_unless_they_were_cut() -> None:
    check_input([result("a")], open_ids=["a"], may_lack=False)
    check_input([USER], open_ids=["a"], may_lack=True)
    with pytest.raises(ParameterError, match="no tool output found for function call a, b"):
        check_input([USER], open_ids=["a", "b"], may_lack=False)
    with pytest.raises(ParameterError, match="no tool output found for function call b"):
        check_input([calls("b")], open_ids=["a"], may_lack=True)
    with pytest.raises(ParameterError, match="output with call_id c"):
        check_input([result("c")], open_ids=["a"], may_lack=True)


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "name": "move", "parameters": NOTHING}
CHAT_TOOL = {"type": "function", "function": {"name": "move"}}


@pytest.fixture(scope="module")
def api(make_tiny_model: Callable[..., Path]) -> Iterator[Any]:
    folder = make_dialect_model(make_tiny_model, "qwen")
    config = EngineConfig(model=str(folder), kv_cache_bytes=16 << 20, window=2048)
    with (
        running_server(config, ServerOptions(port=0, model_name="tiny", in_process=True)) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def output(call_id: str) -> dict[str, str]:
    return {"type": "function_call_output", "call_id": call_id, "output": "ok"}


def test_chats_are_checked(api: Any) -> None:
    messages = [{"role": "user", "content": "go"}, {"role": "tool", "tool_call_id": "a", "content": "ok"}]
    with pytest.raises(openai.BadRequestError, match="preceding message with tool_calls") as caught:
        api.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert caught.value.param == "messages.1.role"


def test_responses_are_checked_against_the_one_before(api: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "max_output_tokens": 80}
    first = api.responses.create(
        input="go", tool_choice="required", parallel_tool_calls=False, reasoning={"effort": "none"}, **fields
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    with pytest.raises(
        openai.BadRequestError, match=f"no tool output found for function call {call.call_id}"
    ):
        api.responses.create(input="and?", previous_response_id=first.id, **fields)
    for wrong in ([output("x")], [output(call.call_id), output(call.call_id)]):
        with pytest.raises(openai.BadRequestError, match="no tool call found for function call output"):
            api.responses.create(input=wrong, previous_response_id=first.id, **fields)
    with pytest.raises(openai.BadRequestError, match="no tool call found") as caught:
        api.responses.create(input=[output(call.call_id)], **fields)
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError, match="no tool call found") as caught:
        api.conversations.create(items=[output("a")])
    assert caught.value.param == "items"
    answered = api.responses.create(input=[output(call.call_id)], previous_response_id=first.id, **fields)
    assert answered.previous_response_id == first.id


def test_a_call_that_was_cut_needs_no_output(api: Any) -> None:
    why = {"type": "object", "properties": {"why": {"type": "string", "minLength": 900}}} | {
        "required": ["why"],
        "additionalProperties": False,
    }
    tools = [TOOL | {"parameters": why}]
    fields: dict[str, Any] = {"model": "tiny", "tools": tools, "reasoning": {"effort": "none"}}
    cut = api.responses.create(input="go", tool_choice="required", max_output_tokens=120, **fields)
    assert cut.status == "incomplete"
    assert [item.type for item in cut.output] == ["function_call"]
    api.responses.create(input="again", previous_response_id=cut.id, max_output_tokens=16, **fields)


def test_without_parallel_tool_calls_there_is_one_at_most(api: Any) -> None:
    """A random model, which hardly ever stops calling where it may go on."""
    fields: dict[str, Any] = {"model": "tiny", "tools": [CHAT_TOOL], "tool_choice": "required"}
    fields |= {"messages": [{"role": "user", "content": "go"}], "max_tokens": 400, "n": 8, "seed": 1}
    fields |= {"reasoning_effort": "none", "temperature": 2}

    def num_calls(**more: Any) -> list[int]:
        reply = api.chat.completions.create(**fields, **more)
        return [len(choice.message.tool_calls) for choice in reply.choices]

    assert num_calls(parallel_tool_calls=False) == [1] * 8
    assert max(num_calls()) > 1
