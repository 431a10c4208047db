"""A route that reads its body itself answers as FastAPI's own does, whatever the body is."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.server.body_route import BodyRoute
from dayshift.engine.server.errors import install_error_handlers
from dayshift.engine.server.openai_fields import CompletionRequest
from dayshift.engine.server.state import State


async def _echo(name: str, body: CompletionRequest, request: Request, state: State) -> Response:
    seen = [name, str(state), request.method, repr(body.model_dump())]
    return Response(json.dumps(seen), media_type="application/json")


def _client(route_class: type[APIRoute]) -> TestClient:
    app, router = FastAPI(), APIRouter(prefix="/v1", route_class=route_class)
    app.state.server = "the state"
    router.post("/echo/{name}")(_echo)
    app.include_router(router)
    install_error_handlers(app)
    return TestClient(app)


_OURS, _FASTAPI = _client(BodyRoute), _client(APIRoute)


def _answers(content: bytes, content_type: str | None) -> list[tuple[int, bytes]]:
    headers = {} if content_type is None else {"Content-Type": content_type}
    answers = [
        client.post("/v1/echo/a%20b", content=content, headers=headers) for client in (_OURS, _FASTAPI)
    ]
    return [(answer.status_code, answer.content) for answer in answers]


numbers = st.one_of(st.integers(), st.floats(allow_nan=True), st.booleans())
values = st.recursive(
    st.one_of(st.none(), numbers, st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
fields = st.sampled_from(
    ["prompt", "max_tokens", "temperature", "stop", "seed", "logit_bias", "stream", "n", "x"]
)
prompts = st.one_of(st.text(), st.lists(st.integers(0, 2**31)), st.lists(st.text()), values)


@given(st.fixed_dictionaries({"prompt": prompts}), st.dictionaries(fields, values, max_size=3), st.booleans())
@settings(deadline=None)
def test_any_json_is_taken_alike(prompt: dict[str, Any], others: dict[str, Any], is_ascii: bool):
    content = json.dumps(prompt | others, ensure_ascii=is_ascii).encode(errors="replace")
    ours, fastapi = _answers(content, "application/json")
    assert ours == fastapi


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"prompt": "a"} ',
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "prompt": [1]}',
        b'{"prompt": "\\ud83d"}',
        b'{"prompt": "\xff"}',
        '{"prompt": "é"}'.encode("utf-16"),
        b'\xef\xbb\xbf{"prompt": "a"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "seed": 123456789012345678901234567890}',
        b'{"prompt": "a", "temperature": 1e-7, "top_p": 0.1000000000000000055511151231257827}',
        b'{"prompt": [1.0]}',
        b"[" * 5000,
    ],
)
@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", "text/plain", None]
)
def test_odd_bodies_are_taken_alike(content: bytes, content_type: str | None):
    ours, fastapi = _answers(content, content_type)
    assert ours == fastapi


def test_a_right_body_does_not_pass_through_fastapi(monkeypatch: pytest.MonkeyPatch):
    def resolve(**_: Any) -> Any:
        raise AssertionError("FastAPI resolves the parameters")

    monkeypatch.setattr("fastapi.routing.solve_dependencies", resolve)
    answer = _OURS.post("/v1/echo/x", json={"prompt": [1, 2]})
    assert answer.status_code == 200
    assert answer.json()[:3] == ["x", "the state", "POST"]
