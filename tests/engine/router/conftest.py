"""Real engines on one store, and routers in front of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dayshift.engine.api import Message, SamplingParams, TurnRequest
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.server.serving import OnReady, running

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)

SERVE = """
import json, sys
from pathlib import Path
from dayshift.engine.config import EngineConfig
from dayshift.engine.server import serve
fields = json.loads(sys.argv[1])
serve(EngineConfig(**fields | {"store_dir": Path(fields["store_dir"])}), port=0,
      on_ready=lambda url: print(url, flush=True))
"""


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline, f"not {what} after a minute"
        time.sleep(0.05)


def wait_until_ready(router_url: str, num_engines: int) -> None:
    """An engine that was slow to answer on a busy machine gets no new sessions for a while."""
    wait_until(
        lambda: httpx.get(f"{router_url}/health").json()["num_ready"] == num_engines, "every engine ready"
    )


def turn(session_id: str, text: str, sampling: SamplingParams = SHORT, **fields: Any) -> TurnRequest:
    return TurnRequest(
        request_id=uuid.uuid4().hex,
        session_id=session_id,
        at=0.0,
        messages=(Message("user", text),),
        sampling=sampling,
        **fields,
    )


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


def gauge(url: str, name: str) -> float:
    """One unlabelled number of an engine's /metrics."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.split()[0] == name)


@pytest.fixture(scope="session")
def base_config(tiny_model_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_model_dir), kv_cache_bytes=32 << 20, window=4000, restore="read")


@dataclass(frozen=True)
class Engines:
    """Two running engines on one store."""

    urls: tuple[str, str]
    config: EngineConfig


@contextmanager
def two_engines(config: EngineConfig, store_dir: Path, **options: Any) -> Iterator[Engines]:
    config = replace(config, store_dir=store_dir)
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                running_server(config, ServerOptions(port=0, model_name="tiny", in_process=True, **options))
            )
            for _ in range(2)
        )
        yield Engines((first, second), config)


@contextmanager
def engine_program(config: EngineConfig, store_dir: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An engine as a group of processes of its own, and its URL; killed at the end."""
    fields = asdict(config) | {"store_dir": str(store_dir)}
    program = subprocess.Popen(
        [sys.executable, "-c", SERVE, json.dumps(fields)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout is not None
        yield program.stdout.readline().strip(), program
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


class ScriptedEngine:
    """A server that does on the wire exactly what a test says; /health it answers as an engine does."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.requests: list[bytes] = []
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            body = b'{"status":"ok","model":"m"}'
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 27\r\n\r\n" + body)
        else:
            length = next((line for line in head.lower().split(b"\r\n") if b"content-length" in line), b":0")
            body = await reader.readexactly(int(length.partition(b":")[2]))
            self.requests.append(head + body)
            await self._handler(reader, writer, head + body)
        writer.close()

    async def _main(self, on_ready: OnReady) -> None:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            on_ready("http://{}:{}".format(*server.sockets[0].getsockname()))
            await server.serve_forever()

    @classmethod
    @contextmanager
    def running(cls, handler: Handler) -> Iterator[ScriptedEngine]:
        engine = cls(handler)
        with running(engine._main, "scripted-engine") as engine.url:
            yield engine
