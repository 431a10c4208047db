"""What one client may take, and what a slow, silent or leaving one costs the others."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from urllib.parse import urlsplit

import httpx
import pytest

from dayshift.engine.api import GenerateRequest, SamplingParams
from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.limits import Limits, raise_open_files_limit
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.wire import SlowReaderError

KEYS = ("first", "second")
LONG = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def limited_url(engine_config: EngineConfig) -> Iterator[str]:
    options = ServerOptions(
        port=0,
        api_key=KEYS[0],
        more_api_keys=KEYS[1:],
        limits=Limits(max_requests_per_key=2, max_request_tokens=5000, body_timeout_s=0.5),
        in_process=True,
    )
    with running_server(engine_config, options) as url:
        yield url


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def client(limited_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=limited_url, timeout=60, headers=headers("first")) as client:
        yield client


def test_each_key_has_its_own_calls(limited_url: str, client: httpx.Client):
    def post(key: str) -> httpx.Response:
        return client.post("/v1/completions", json=SHORT, headers=headers(key))

    with ExitStack() as stack:
        streams = [stack.enter_context(client.stream("POST", "/v1/completions", json=LONG)) for _ in range(2)]
        lines = [stream.iter_lines() for stream in streams]
        assert all(next(line) for line in lines)
        refused = post("first")
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "too_many_requests"
        assert post("second").status_code == 200
        assert post("third").status_code == 401
        assert client.get("/v1/models").status_code == 200, "looking costs nothing"
    deadline = time.monotonic() + 30
    while post("first").status_code == 429:  # until the server has noticed that both are gone
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_tokens_of_all_choices_are_counted(client: httpx.Client):
    body = SHORT | {"max_tokens": 1000, "n": 6}
    refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "6006 tokens; this server takes 5000" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def hasty_url(engine_config: EngineConfig) -> Iterator[str]:
    options = ServerOptions(port=0, limits=Limits(request_timeout_s=0.5), in_process=True)
    with running_server(engine_config, options) as url:
        yield url


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_takes_too_long_is_cancelled(hasty_url: str, stream: bool):
    response = httpx.post(
        f"{hasty_url}/v1/completions", json=LONG | {"max_tokens": 7000, "stream": stream}, timeout=60
    )
    if stream:
        assert response.status_code == 200
        last = [line for line in response.text.splitlines() if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert response.status_code == 408
        error = response.json()["error"]
    assert error["code"] == "request_timeout"
    assert "longer than 0.5 s" in error["message"]


def test_a_body_that_does_not_come_is_not_waited_for(limited_url: str):
    address = urlsplit(limited_url)
    assert address.hostname is not None
    with socket.create_connection((address.hostname, address.port or 0), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer first\r\n"
            b'content-type: application/json\r\ncontent-length: 100\r\n\r\n{"prompt":'
        )
        answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_reader_that_falls_behind_is_cancelled_and_costs_no_other(engine_config: EngineConfig):
    async def run() -> None:
        engine = await AsyncEngine.start(engine_config, in_process=True)

        def request(name: str) -> GenerateRequest:
            sampling = SamplingParams(max_tokens=200, ignore_eos=True)
            return GenerateRequest(request_id=name, prompt_token_ids=(5, 6), sampling=sampling)

        try:
            slow = await engine.submit(request("slow"), max_unread=20)
            quick = await engine.submit(request("quick"), max_unread=200)
            assert len([chunk async for chunk in quick]) == 200
            pieces = [await anext(slow) for _ in range(20)]
            assert pieces[-1].finish_reason is None
            with pytest.raises(SlowReaderError, match="20 pieces wait, the rest was cancelled"):
                await anext(slow)
            stats = await engine.stats()
            assert stats["num_running"] == 0
            assert stats["num_free_kv_blocks"] == stats["num_kv_blocks"]
        finally:
            await engine.close()

    asyncio.run(run())


def test_calls_end_in_order_when_the_server_does(engine_config: EngineConfig):
    """A short call that runs is finished; nobody is left waiting."""
    answers: list[httpx.Response] = []

    def call(url: str) -> None:
        body = SHORT | {"max_tokens": 60, "ignore_eos": True}
        answers.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))

    with ThreadPoolExecutor(1) as executor:
        with running_server(engine_config, ServerOptions(port=0, in_process=True)) as url:
            running = executor.submit(call, url)
            while not running.done() and _num_running(url) == 0:
                time.sleep(0.01)
        running.result(timeout=60)
    assert answers[0].status_code in (200, 503)
    if answers[0].status_code == 200:
        assert answers[0].json()["usage"]["completion_tokens"] == 60


def _num_running(url: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("dayshift_engine_num_running "))


# Opens connections, says so, and holds them until its input ends.
_HOLDER = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, port, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
held = [socket.create_connection((host, port), 60) for _ in range(number)]
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_ten_thousand_idle_connections_hold_nobody_up(
    server_url: str, http: httpx.Client, gauge: Callable[[str], float]
):
    raise_open_files_limit()
    address = urlsplit(server_url)
    num_threads = threading.active_count()
    command = [sys.executable, "-c", _HOLDER, str(address.hostname), str(address.port), "10000"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "10000\n"
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        assert gauge("dayshift_engine_num_running") == 0
        assert threading.active_count() <= num_threads + 8
        holder.communicate()
    assert http.get("/health").status_code == 200
