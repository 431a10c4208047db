import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.sessions.manager import SessionManager
from dayshift.types import DayshiftError

KEY = "a key with ümlaut"
AUTHORIZED = {b"authorization": f"Bearer {KEY}".encode()}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert "Traceback" not in response.text
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat/completions", {"banana": 1}, "banana"),
        ("chat/completions", {"frequency_penalty": 2.5}, "frequency_penalty"),
        ("chat/completions", {"presence_penalty": "x"}, "presence_penalty"),
        ("chat/completions", {"repetition_penalty": 0}, "repetition_penalty"),
        ("chat/completions", {"tools": [{"type": "function"}]}, "tools.0.function"),
        ("chat/completions", {"tools": [TOOL | {"type": "banana"}]}, "tools.0.type"),
        ("chat/completions", {"tools": [TOOL]}, "tools"),
        ("chat/completions", {"tools": [TOOL, TOOL]}, "tools"),
        ("chat/completions", {"tool_choice": "auto"}, "tool_choice"),
        (
            "chat/completions",
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
        ),
        ("chat/completions", {"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice"),
        ("chat/completions", {"functions": []}, "functions"),
        ("chat/completions", {"audio": {}}, "audio"),
        ("chat/completions", {"reasoning_effort": "high"}, "reasoning_effort"),
        ("chat/completions", {"reasoning_budget": 5}, "reasoning_budget"),
        (
            "chat/completions",
            {"chat_template_kwargs": {"enable_thinking": True}},
            "chat_template_kwargs.enable_thinking",
        ),
        ("chat/completions", {"logit_bias": {"5": 101}}, "logit_bias.5"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
            "messages.0",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]},
            "messages.0",
        ),
        ("chat/completions", {"parallel_tool_calls": False}, "parallel_tool_calls"),
        ("chat/completions", {"parallel_tool_calls": True, "tools": []}, "parallel_tool_calls"),
        ("chat/completions", {"temperature": -1}, "temperature"),
        ("chat/completions", {"n": 0}, "n"),
        ("chat/completions", {"stop": [""]}, "stop.0"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "pirate", "content": "x"}]}, "messages.0.role"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "x", "name": "n"}]},
            "messages.0.name",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
        ),
        ("chat/completions", {"response_format": {"type": "xml"}}, "response_format.type"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ("completions", {"prompt": "x", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "x", "grammar": "start: ("}, "grammar"),
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("completions", {"prompt": [99999]}, "prompt"),
        ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
        (
            "completions",
            {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ("sessions", {"tools": [TOOL]}, "tools"),
        ("sessions", {"window": 0}, "window"),
        ("sessions", {"session_id": "../../etc/passwd"}, "session_id"),
        ("sessions", {"history": [{"at": 0, "messages": []}]}, "history.0.messages"),
        ("sessions/x/turns", {"text": "hi", "recall_mode": "maybe"}, "recall_mode"),
        ("sessions/x/turns", {"text": "hi", "recall_range": [1]}, "recall_range.1"),
    ],
)
def test_a_wrong_field_is_named(http: httpx.Client, path: str, fields: dict, param: str):
    base = CHAT if path == "chat/completions" else {}
    error = error_of(http.post(f"/v1/{path}", json=base | fields), 400)
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, "stream_options"),
        ("chat/completions", {"max_completion_tokens": 4}, "max_completion_tokens"),
        ("chat/completions", {"stop": ""}, "stop: must not be empty"),
        ("chat/completions", {"stop": ["a", ""]}, "stop.1: must not be empty"),
        ("chat/completions", {"messages": "hi"}, "messages: Input should be a valid list"),
        ("completions", {"prompt": [99999]}, "99999"),
        ("completions", {"prompt": [99999], "echo": True}, "99999"),
        ("completions", {"prompt": "x", "logit_bias": {"99999": 1}}, "99999"),
        ("embeddings", {"input": "x"}, "/v1/embeddings is not served"),
        ("completions", {"prompt": [1] * 9000}, "8192"),
        ("sessions/x/turns", {"text": "hi", "token_ids": [1]}, "exactly one of text, messages and token_ids"),
        ("sessions/x/turns", {}, "exactly one of text, messages and token_ids"),
    ],
)
def test_what_cannot_be_done_is_explained(http: httpx.Client, path: str, fields: dict, message: str):
    base = CHAT if path == "chat/completions" else {}
    assert message in error_of(http.post(f"/v1/{path}", json=base | fields), 400)["message"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "a b " * 9000}]}),
        ("chat/completions", {"max_tokens": 9000}),
        ("completions", {"prompt": [1] * 9000}),
        ("responses", {"input": "a b " * 9000}),
        ("responses", {"input": "hi", "store": False, "max_output_tokens": 9000}),
    ],
)
def test_what_is_too_long_has_the_code_that_clients_look_for(http: httpx.Client, path: str, fields: dict):
    base = CHAT if path == "chat/completions" else {}
    assert error_of(http.post(f"/v1/{path}", json=base | fields), 400)["code"] == "context_length_exceeded"


def test_values_that_change_nothing_are_accepted(http: httpx.Client):
    neutral = {
        "n": 1,
        "user": "somebody",
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "tools": [],
        "tool_choice": "none",
        "store": False,
        "temperature": None,
        "stop": None,
        "stream_options": None,
        "response_format": {"type": "text"},
    }
    assert http.post("/v1/chat/completions", json=CHAT | neutral).status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(http: httpx.Client, content: bytes):
    headers = {"content-type": "application/json"}
    error_of(http.post("/v1/chat/completions", content=content, headers=headers), 400)


def test_half_a_character_and_numbers_that_are_none_are_400s(http: httpx.Client):
    headers = {"content-type": "application/json"}
    bodies = [
        '{"messages":[{"role":"user","content":"\\ud83d"}]}',
        '{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        '{"messages":[{"role":"user","content":"x"}],"seed":1e400}',
        '{"messages":[{"role":"user","content":"x"}],"response_format":'
        '{"type":"json_schema","json_schema":{"name":"x","schema":{"const":"\\ud83d"}}}}',
    ]
    for body in bodies:
        error_of(http.post("/v1/chat/completions", content=body, headers=headers), 400)
    turn = '{"text":"x","at":Infinity}'
    error_of(http.post("/v1/sessions/x/turns", content=turn, headers=headers), 400)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
field_names = [
    "model",
    "messages",
    "prompt",
    "text",
    "token_ids",
    "stop",
    "seed",
    "n",
    "top_p",
    "top_k",
    "temperature",
    "logprobs",
    "response_format",
    "json_schema",
    "stream_options",
    "user",
    "at",
    "recall_range",
    "priority",
]


@given(st.sampled_from(["chat/completions", "completions", "sessions/x/turns", "sessions"]), st.data())
@settings(max_examples=150, deadline=None)
def test_no_body_breaks_the_server(http: httpx.Client, path: str, data: st.DataObject):
    body = data.draw(st.dictionaries(st.sampled_from(field_names), json_values, max_size=5))
    body |= {} if path == "sessions" else {"max_tokens": 1}
    if data.draw(st.booleans()):
        body |= {"messages": CHAT["messages"]} if path != "completions" else {"prompt": "x"}
    content = json.dumps(body).encode()
    response = http.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 201, 400, 404), response.text
    if response.status_code >= 400:
        error_of(response, response.status_code)


def test_another_model_is_named(http: httpx.Client):
    error = error_of(http.post("/v1/chat/completions", json=CHAT | {"model": "banana"}), 404)
    assert error["param"] == "model"
    assert "'banana' is not served here" in error["message"]


def test_unknown_routes_and_methods_have_openai_bodies(http: httpx.Client):
    error = error_of(http.get("/v1/banana"), 404)
    assert error["message"] == "there is no endpoint GET /v1/banana; /openapi.json lists all"
    error_of(http.get("/v1/completions"), 405)


def test_only_loopback_host_names_are_let_in_without_a_key(http: httpx.Client):
    for host in ("evil.example", "evil.example:80", "[::2]:80", ""):
        error_of(http.get("/v1/models", headers={"host": host}), 400)
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:80"):
        assert http.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.fixture(scope="module")
def guarded(engine_config: EngineConfig) -> Iterator[httpx.Client]:
    """A server with an API key and a small limit on bodies."""
    options = ServerOptions(port=0, api_key=KEY, max_body_bytes=10_000, in_process=True)
    with running_server(engine_config, options) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_the_api_key_is_asked_for_everywhere_but_at_health(guarded: httpx.Client):
    assert guarded.get("/health").status_code == 200
    wrong: list[dict[str, str]] = [{}, {"authorization": "Bearer wrong"}, {"authorization": "Basic wrong"}]
    for headers in wrong:
        for path in ("/v1/models", "/metrics", "/v1/sessions", "/nowhere"):
            assert error_of(guarded.get(path, headers=headers), 401)["type"] == "authentication_error"
    for scheme in ("Bearer", "bearer", "Api-Key"):
        right = {b"authorization": f"{scheme} {KEY}".encode(), b"host": b"planner.example"}
        assert guarded.get("/v1/models", headers=right).status_code == 200


def test_the_official_client_sees_a_wrong_key(guarded: httpx.Client):
    with (
        openai.OpenAI(base_url=f"{guarded.base_url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_over_the_limit_is_a_413(guarded: httpx.Client, is_chunked: bool):
    headers = AUTHORIZED | {b"content-type": b"application/json"}

    def post(num_bytes: int) -> httpx.Response:
        body = json.dumps({"prompt": "x" * num_bytes, "max_tokens": 1}).encode()
        content = iter([body[:5000], body[5000:]]) if is_chunked else body
        return guarded.post("/v1/completions", content=content, headers=headers)

    assert post(6000).status_code == 200
    for num_bytes in (10_001, 50_000, 60_000):
        assert error_of(post(num_bytes), 413)["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_after_admission_reaches_the_client(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    def out_of_space(*_: object) -> None:
        raise DayshiftError("no space left on device")

    session_id = http.post("/v1/sessions", json={}).json()["session_id"]
    with monkeypatch.context() as faulty:
        faulty.setattr(SessionManager, "plan", out_of_space)
        response = http.post(f"/v1/sessions/{session_id}/turns", json={"text": "hi", "stream": stream})
    if stream:
        events = [line for line in response.text.splitlines() if line]
        assert len(events) == 1
        error = json.loads(events[0].removeprefix("data: "))["error"]
    else:
        error = error_of(response, 500)
    assert error["message"] == "no space left on device"
    assert http.get(f"/v1/sessions/{session_id}").json()["turns"] == []
    http.delete(f"/v1/sessions/{session_id}")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("chat/completions", {"messages": []}, "messages: needs at least 1 item"),
        ("responses", {"input": "x", "include": ["x"]}, "include: only an empty list is supported"),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, "stop: at most 16 items are allowed, found 17"),
    ],
)
def test_a_list_of_a_wrong_length_is_told_in_words_of_json(
    http: httpx.Client, path: str, fields: dict, message: str
):
    assert error_of(http.post(f"/v1/{path}", json=fields), 400)["message"] == message
