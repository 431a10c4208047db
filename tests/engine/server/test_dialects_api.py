"""Reasoning and tools through the official client, with random models: streamed = unstreamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from tests.engine.dialect_models import DIALECTS, make_dialect_model

MOVE = {
    "type": "object",
    "properties": {"to": {"enum": ["shelf", "böx"]}, "why": {"type": "string", "maxLength": 6}},
    "required": ["to"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"note": {"type": "string", "maxLength": 8}},
    "required": ["note"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "move", "description": "go", "parameters": MOVE, "strict": True},
    },
    {"type": "function", "function": {"name": "stop"}},
]
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER, "strict": True}}
QUESTION = [{"role": "user", "content": "Shift 1, job 2?"}]
NAMED = {"type": "function", "function": {"name": "move"}}


@pytest.fixture(scope="module")
def apis(make_tiny_model: Callable[..., Path]) -> Iterator[dict[str, Any]]:
    """The official client of each dialect's model, served under the dialect's name."""
    with ExitStack() as stack:
        clients = {}
        for name in DIALECTS:
            folder = make_dialect_model(make_tiny_model, name)
            config = EngineConfig(model=str(folder), kv_cache_bytes=16 << 20, window=512)
            options = ServerOptions(port=0, model_name=name, in_process=True)
            url = stack.enter_context(running_server(config, options))
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
            clients[name] = stack.enter_context(client)
        yield clients


Reply = dict[str, Any]


def whole(api: Any, **fields: Any) -> list[Reply]:
    reply = api.chat.completions.create(**fields)
    return [
        {
            "content": choice.message.content or "",
            "reasoning": choice.message.model_extra.get("reasoning_content", ""),
            "calls": [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []],
            "finish_reason": choice.finish_reason,
            "logprobs": None if choice.logprobs is None else [t.token for t in choice.logprobs.content],
        }
        for choice in reply.choices
    ]


def streamed(api: Any, **fields: Any) -> list[Reply]:
    replies: dict[int, Reply] = {}
    for chunk in api.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            reply = replies.setdefault(
                choice.index,
                {"content": "", "reasoning": "", "calls": [], "finish_reason": None, "logprobs": None},
            )
            assert reply["finish_reason"] is None, "nothing follows the finish chunk of a choice"
            reply["content"] += choice.delta.content or ""
            reply["reasoning"] += choice.delta.model_extra.get("reasoning_content", "")
            for call in choice.delta.tool_calls or []:
                if call.function.name is not None:
                    assert call.index == len(reply["calls"])
                    assert call.id.startswith("call_")
                    reply["calls"].append((call.function.name, ""))
                name, arguments = reply["calls"][call.index]
                reply["calls"][call.index] = (name, arguments + call.function.arguments)
            if choice.logprobs is not None:
                reply["logprobs"] = (reply["logprobs"] or []) + [t.token for t in choice.logprobs.content]
            reply["finish_reason"] = choice.finish_reason
    return [replies[index] for index in sorted(replies)]


requests = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**40),
        "temperature": st.sampled_from([1.0, 2.0]),
        "n": st.integers(1, 2),
        "max_tokens": st.integers(1, 60),
        "tool_choice": st.sampled_from([None, "none", "auto", "required", NAMED]),
        "response_format": st.sampled_from([None, RESPONSE_FORMAT]),
        "parallel_tool_calls": st.booleans(),
        "reasoning": st.sampled_from(["as it is", "off", "budget"]),
        "stop": st.sampled_from([None, ["e", "ü"]]),
        "frequency_penalty": st.sampled_from([0, 1.5]),
        "logprobs": st.booleans(),
    }
)


def request_fields(name: str, drawn: dict[str, Any]) -> dict[str, Any]:
    """The drawn fields, without those that the dialect does not have."""
    fields = {key: value for key, value in drawn.items() if value is not None}
    reasoning, extra = fields.pop("reasoning"), {}
    if reasoning == "budget" and name in ("qwen", "harmony"):
        extra["reasoning_budget"] = 7
    if reasoning == "off" and name == "qwen":
        extra["chat_template_kwargs"] = {"enable_thinking": False}
    if "tool_choice" in fields:
        fields["tools"] = TOOLS
    else:
        del fields["parallel_tool_calls"]
    return {"model": name, "messages": QUESTION, "extra_body": extra, **fields}


def check(name: str, fields: dict[str, Any], reply: Reply) -> None:
    for text in (reply["content"], reply["reasoning"], *(arguments for _, arguments in reply["calls"])):
        for marker in ("<|channel|>", "<|message|>", "<|end|>", "<|im_end|>"):
            assert marker not in text
        if fields.get("tool_choice") not in (None, "none") or fields.get("response_format"):
            # Without a grammar, a random model writes these words as any others.
            assert "<tool_call>" not in text
            assert "</think>" not in text
    if reply["finish_reason"] == "length" or fields.get("stop"):
        return
    choice = fields.get("tool_choice")
    assert (reply["finish_reason"] == "tool_calls") == bool(reply["calls"])
    if choice in ("required", NAMED):
        assert reply["calls"]
    if choice == NAMED:
        assert [call for call, _ in reply["calls"]] == ["move"]
    for call, arguments in reply["calls"]:
        value = json.loads(arguments)
        if call == "move":
            jsonschema.validate(value, MOVE)
        else:
            assert value == {}
    if fields.get("response_format") and not reply["calls"]:
        jsonschema.validate(json.loads(reply["content"]), ANSWER)


def compare(apis: dict[str, Any], name: str, drawn: dict[str, Any]) -> None:
    fields = request_fields(name, drawn)
    replies = whole(apis[name], **fields)
    assert streamed(apis[name], **fields) == replies
    for reply in replies:
        check(name, fields, reply)


quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(name=st.sampled_from(DIALECTS), drawn=requests)
@quick
def test_a_streamed_reply_is_the_whole_reply(apis: dict[str, Any], name: str, drawn: dict):
    compare(apis, name, drawn)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(name=st.sampled_from(DIALECTS), drawn=requests)
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_500_streamed_replies_are_the_whole_replies(apis: dict[str, Any], name: str, drawn: dict):
    compare(apis, name, drawn)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_tool_call_and_its_answer_come_back_in_the_conversation(apis: dict[str, Any], name: str):
    api = apis[name]
    fields = {"model": name, "tools": TOOLS, "seed": 1, "max_tokens": 300}
    message = api.chat.completions.create(messages=QUESTION, tool_choice=NAMED, **fields).choices[0].message
    (call,) = message.tool_calls
    history = [
        *QUESTION,
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "at the shelf"},
    ]
    without = api.chat.completions.create(messages=QUESTION, **fields).usage.prompt_tokens
    reply = api.chat.completions.create(messages=history, tool_choice="auto", **fields)
    assert reply.usage.prompt_tokens > without + 10


@pytest.mark.parametrize("name", DIALECTS)
def test_a_tool_call_cut_by_max_tokens_ends_with_length(apis: dict[str, Any], name: str):
    extra = {"qwen": {"reasoning_effort": "none"}, "harmony": {"reasoning_budget": 1}}.get(name, {})
    fields = {"model": name, "messages": QUESTION, "tools": TOOLS, "tool_choice": NAMED, "extra_body": extra}
    for max_tokens in range(8, 80, 3):
        (reply,) = whole(apis[name], max_tokens=max_tokens, seed=3, **fields)
        if reply["finish_reason"] == "tool_calls":
            break
        assert reply["finish_reason"] == "length"
        if reply["calls"]:
            with pytest.raises(ValueError, match=r"."):
                json.loads(reply["calls"][0][1])
            assert streamed(apis[name], max_tokens=max_tokens, seed=3, **fields) == [reply]
            return
    pytest.fail("no call was cut")


def test_a_tool_call_cut_by_a_stop_string_ends_with_stop(apis: dict[str, Any]):
    fields = {"messages": QUESTION, "tools": TOOLS, "tool_choice": NAMED, "seed": 3, "max_tokens": 300}
    fields["extra_body"] = {"reasoning_effort": "none"}
    (free,) = whole(apis["qwen"], model="qwen", **fields)
    assert free["finish_reason"] == "tool_calls"
    (_, arguments), *_ = free["calls"]
    for stop in (arguments[1:5], arguments[-3:]):
        cut = whole(apis["qwen"], model="qwen", stop=[stop], **fields)
        assert streamed(apis["qwen"], model="qwen", stop=[stop], **fields) == cut
        assert cut[0]["finish_reason"] == "stop"
        assert cut[0]["calls"][0][1] == arguments[: arguments.index(stop)]


def test_a_model_without_sessions_says_so_at_start_and_when_one_is_asked_for(
    make_tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
):
    """As gpt-oss's template; its responses are answered from their text."""
    config = EngineConfig(model=str(make_dialect_model(make_tiny_model, "harmony")), kv_cache_bytes=16 << 20)
    with running_server(config, ServerOptions(port=0, in_process=True)) as url:
        (said,) = [record.getMessage() for record in caplog.records if "no sessions" in record.getMessage()]
        _, _, reason = said.partition("this model has no sessions: ")
        assert reason.endswith("the chat template rewrites earlier turns, so a new turn cannot be appended")
        assert "\n" not in said
        refused = httpx.post(f"{url}/v1/sessions", json={})
        assert refused.status_code == 400
        assert reason in refused.json()["error"]["message"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            fields: dict[str, Any] = {"model": None, "max_output_tokens": 20}
            first = client.responses.create(input="go", **fields)
            second = client.responses.create(input="on", previous_response_id=first.id, **fields)
        assert second.usage.input_tokens > first.usage.input_tokens


def test_reasoning_is_kept_apart_and_counted(apis: dict[str, Any]):
    for name in ("qwen", "harmony"):
        fields: dict[str, Any] = {"model": name, "messages": QUESTION, "max_tokens": 60}
        found = 0
        for seed in range(12):
            reply = apis[name].chat.completions.create(
                seed=seed, extra_body={"reasoning_budget": 6}, **fields
            )
            details = reply.usage.completion_tokens_details
            reasoning = reply.choices[0].message.model_extra.get("reasoning_content", "")
            if reasoning:
                found += 1
                assert 0 < details.reasoning_tokens <= 10
            assert details.reasoning_tokens <= reply.usage.completion_tokens
        if name == "harmony":
            assert found


def test_switched_off_reasoning_stays_off(apis: dict[str, Any]):
    for effort in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        reply = apis["qwen"].chat.completions.create(
            model="qwen", messages=QUESTION, max_tokens=30, seed=2, extra_body=effort
        )
        assert reply.usage.completion_tokens_details.reasoning_tokens == 0
        assert "reasoning_content" not in reply.choices[0].message.model_extra
    with pytest.raises(openai.BadRequestError, match="low, medium, high"):
        apis["harmony"].chat.completions.create(
            model="harmony",
            messages=QUESTION,
            reasoning_effort="none",
        )


def test_the_effort_reaches_the_prompt_of_a_model_that_has_the_word(apis: dict[str, Any]):
    lengths = [
        apis["harmony"]
        .chat.completions.create(
            model="harmony",
            messages=QUESTION,
            reasoning_effort=effort,
            max_tokens=1,
        )
        .usage.prompt_tokens
        for effort in ("low", "medium")
    ]
    assert lengths[0] != lengths[1]


def test_a_strict_schema_that_cannot_be_enforced_is_refused(apis: dict[str, Any]):
    parameters = {"type": "object", "not": {"type": "string"}}
    for strict in (False, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}
        fields: dict[str, Any] = {"messages": QUESTION, "tools": [tool], "max_tokens": 2}
        if strict:
            with pytest.raises(openai.BadRequestError, match="Unimplemented keys") as caught:
                apis["qwen"].chat.completions.create(model="qwen", **fields)
            assert caught.value.param == "tools"
        else:
            apis["qwen"].chat.completions.create(model="qwen", **fields)
