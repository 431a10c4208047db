"""The engine core as a process of its own, and the server as a program."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dayshift.engine.api import GenerateRequest, SamplingParams
from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.config import EngineConfig
from dayshift.engine.engine import Engine
from dayshift.engine.server.run import ServerOptions, running_server, serve
from dayshift.engine.wire import EngineDiedError
from dayshift.types import DayshiftError

SERVE = """
import json, sys
from dayshift.engine.config import EngineConfig
from dayshift.engine.server import serve
serve(EngineConfig(**json.loads(sys.argv[1])), port=0, on_ready=lambda url: print(url, flush=True))
"""


def children_of(pid: int) -> list[int]:
    """Process ids of the running child processes."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in lists for child in text.split() if not is_gone(int(child))]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still running: {[pid for pid in pids if not is_gone(pid)]}"
        time.sleep(0.05)


@contextmanager
def server_program(config: EngineConfig) -> Iterator[subprocess.Popen[str]]:
    """`serve` in a Python process of its own; it writes its URL when it is ready."""
    program = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(asdict(config))],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def read_url(program: subprocess.Popen[str]) -> str:
    assert program.stdout is not None
    return program.stdout.readline().strip()


def test_sigterm_ends_the_server_in_order_even_under_load(engine_config: EngineConfig):
    with server_program(engine_config) as program:
        url = read_url(program)
        children = children_of(program.pid)
        assert children
        body = {"prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            program.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]  # to the end of a response that is whole
        _, errors = program.communicate(timeout=60)
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["type"], error["code"]) == ("server_error", "server_closing")
        assert program.returncode == 0
        assert "Traceback" not in errors
        wait_until_gone(children)


def test_ctrl_c_while_the_model_loads_leaves_nothing_behind(engine_config: EngineConfig):
    with server_program(engine_config) as program:
        while not (children := children_of(program.pid)):
            assert program.poll() is None
            time.sleep(0.01)
        for pid in (*children, program.pid):  # a terminal signals the whole group
            os.kill(pid, signal.SIGINT)
        output, errors = program.communicate(timeout=60)
        assert (program.returncode, output) == (0, "")
        assert "Traceback" not in errors
        wait_until_gone(children)


def test_the_core_ends_when_its_parent_is_killed(engine_config: EngineConfig):
    with server_program(engine_config) as program:
        assert httpx.get(f"{read_url(program)}/health").status_code == 200
        children = children_of(program.pid)
        assert children
        program.send_signal(signal.SIGKILL)
        wait_until_gone(children)


def test_when_the_core_dies_everybody_is_told(engine_config: EngineConfig):
    with (
        running_server(engine_config, ServerOptions(port=0)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        body = {"prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            cores = [pid for pid in children_of(os.getpid()) if b"spawn_main" in cmdline(pid)]
            assert len(cores) == 1
            os.kill(cores[0], signal.SIGKILL)
            last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_died"
        assert "exit code -9" in error["message"]
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "dead")
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_died")


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("in_process", [True, False])
def test_a_missing_model_is_one_line(in_process: bool):
    async def main() -> None:
        await AsyncEngine.start(EngineConfig(model="/nowhere/model"), in_process=in_process)

    with pytest.raises(DayshiftError, match=r"^model folder /nowhere/model does not exist") as caught:
        asyncio.run(main())
    assert type(caught.value) is DayshiftError
    assert "\n" not in str(caught.value)


def test_a_defect_in_a_step_ends_the_core_and_every_request(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    def defect(_: Engine) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        engine = await AsyncEngine.start(engine_config, in_process=True)
        monkeypatch.setattr(Engine, "step", defect)
        stream = await engine.submit(GenerateRequest(request_id="r", prompt_token_ids=(5,)))
        with pytest.raises(EngineDiedError, match="engine core failed: ZeroDivisionError"):
            await anext(stream)
        assert engine.failure == "engine core failed: ZeroDivisionError"
        await engine.close()

    asyncio.run(main())


def test_closing_an_engine_ends_what_runs(engine_config: EngineConfig):
    async def main() -> None:
        engine = await AsyncEngine.start(engine_config, in_process=True)
        sampling = SamplingParams(max_tokens=7000, ignore_eos=True)
        request = GenerateRequest(request_id="r", prompt_token_ids=(5,), sampling=sampling)
        stream = await engine.submit(request)
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineDiedError, match="shut down"):
            async for _ in stream:
                pass
        with pytest.raises(EngineDiedError, match="shut down"):
            await engine.sessions()

    asyncio.run(main())


def test_a_port_in_use_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DayshiftError, match=f"address 127.0.0.1, port {port} is in use"):
            serve(EngineConfig(model="/nowhere/model"), port=port)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_other_addresses_than_loopback_need_a_key(host: str):
    with pytest.raises(DayshiftError, match="needs an API key"):
        serve(EngineConfig(model="/nowhere/model"), host=host)


@pytest.mark.parametrize(
    ("host", "port"), [("192.0.2.1", 0), ("no-such-host.invalid", 0), ("127.0.0.1", 70000)]
)
def test_an_address_that_cannot_be_used_is_one_line(host: str, port: int):
    with pytest.raises(DayshiftError, match=host if port == 0 else "70000") as caught:
        serve(EngineConfig(model="/nowhere/model"), host=host, port=port, api_key="k")
    assert "\n" not in str(caught.value)


def test_a_call_that_is_not_over_when_the_server_ends_is_told_so(engine_config: EngineConfig):
    body = {"prompt": "x", "max_tokens": 7000, "ignore_eos": True}
    options = ServerOptions(port=0, model_name="tiny", in_process=True)
    with ThreadPoolExecutor(2) as clients:
        with running_server(engine_config, options) as url:
            whole = clients.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            official = clients.submit(stream_to_the_end, f"{url}/v1", body)
            while "dayshift_engine_num_running 2.0" not in httpx.get(f"{url}/metrics").text:
                time.sleep(0.01)
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "server_closing")
        with pytest.raises(openai.APIError, match="the server is told to end") as caught:
            official.result()
        assert caught.value.code == "server_closing"


def stream_to_the_end(url: str, body: dict[str, Any]) -> None:
    with openai.OpenAI(base_url=url, api_key="unused", max_retries=0) as client:
        for _ in client.completions.create(
            model="tiny",
            prompt=body["prompt"],
            max_tokens=body["max_tokens"],
            stream=True,
            extra_body={"ignore_eos": True},
        ):
            pass
