"""What goes over the wire, against scripted engines: bytes, breaks, and what is sent twice."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from dayshift.engine.router import running_router
from tests.engine.router.conftest import ScriptedEngine, error_of

EVENT_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def break_off(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
    """Close the connection when the request has come, without a byte of reply."""


async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-own: 7\r\n\r\nok")


@contextmanager
def routed(*engines: ScriptedEngine) -> Iterator[httpx.Client]:
    with (
        running_router([engine.url for engine in engines]) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


def test_bytes_pass_as_they_come_and_as_they_are():
    pieces = [
        b"data: {}\n\n",
        b"da",
        b"ta: \xff\x00 half a ch\xc3",
        b"\xa4racter\n\n",
        b": \r\n",
        b"data: [DONE]\n\n",
    ]
    has_arrived = threading.Semaphore(0)

    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        writer.write(EVENT_STREAM)
        for piece in pieces:
            writer.write(chunk(piece))
            # The next piece is written when this one is at the client: nobody may hold it back.
            assert await asyncio.to_thread(has_arrived.acquire, timeout=30)
        writer.write(b"0\r\n\r\n")

    with (
        ScriptedEngine.running(handler) as engine,
        routed(engine) as client,
        client.stream("POST", "/v1/chat/completions?a=%20b", content=b"\x00{body") as response,
    ):
        received = []
        for piece in response.iter_raw():
            received.append(piece)
            has_arrived.release()
    assert received == pieces
    assert response.headers["content-type"] == "text/event-stream"
    assert engine.requests[0].startswith(b"POST /v1/chat/completions?a=%20b HTTP/1.1\r\n")
    assert engine.requests[0].endswith(b"\r\n\r\n\x00{body")


def test_headers_pass_but_for_those_of_one_connection():
    with ScriptedEngine.running(answer) as engine, routed(engine) as client:
        headers = {"Authorization": "Bearer k", "X-Own": "1", "Keep-Alive": "9", "Accept-Encoding": "br"}
        response = client.get("/v1/models", headers=headers)
    request = engine.requests[0].lower()
    assert b"authorization: bearer k\r\n" in request
    assert b"x-own: 1\r\n" in request
    assert b"accept-encoding: br\r\n" in request
    assert b"host: " + engine.url.removeprefix("http://").encode() in request
    assert b"keep-alive: 9" not in request
    assert (response.headers["x-own"], len(response.headers.get_list("date"))) == ("7", 1)


@pytest.mark.parametrize(
    "path", ["/v1/sessions/s/turns", "/v1/chat/completions", "/v1/sessions", "/v1/sessions/s/fork"]
)
def test_a_call_that_an_engine_may_have_taken_is_not_sent_again(path: str):
    with (
        ScriptedEngine.running(break_off) as first,
        ScriptedEngine.running(break_off) as second,
        routed(first, second) as client,
    ):
        error = error_of(client.post(path, json={}), 502)
        assert len(first.requests) + len(second.requests) == 1
    assert error["code"] == "engine_unreachable"
    assert "whether the call was taken is not known" in error["message"]


def test_a_call_that_changes_nothing_is_sent_to_the_next_engine():
    with (
        ScriptedEngine.running(break_off) as first,
        ScriptedEngine.running(answer) as second,
        routed(first, second) as client,
    ):
        assert client.get("/v1/models").content == b"ok"
        assert (len(first.requests), len(second.requests)) == (1, 1)


def test_a_stream_that_breaks_between_events_ends_with_an_error_event():
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        writer.write(EVENT_STREAM + chunk(b"data: 1\n\n"))

    with ScriptedEngine.running(handler) as engine, routed(engine) as client:
        lines = [line for line in client.post("/v1/chat/completions").text.split("\n") if line]
    assert lines[0] == "data: 1"
    assert json.loads(lines[1].removeprefix("data: "))["error"]["code"] == "engine_unreachable"
    assert len(lines) == 2


@pytest.mark.parametrize(
    "reply",
    [
        EVENT_STREAM + chunk(b"data: 1\n\ndata: ha"),
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf",
    ],
)
def test_any_other_reply_that_breaks_is_not_taken_for_a_whole_one(reply: bytes):
    async def handler(_: asyncio.StreamReader, writer: asyncio.StreamWriter, __: bytes) -> None:
        writer.write(reply)

    with (
        ScriptedEngine.running(handler) as engine,
        routed(engine) as client,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        client.post("/v1/chat/completions")
