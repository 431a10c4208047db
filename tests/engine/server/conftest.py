"""A real server on a loopback port, with the engine in a thread of the test process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server

MODEL = "tiny"


@pytest.fixture(scope="session")
def engine_config(tiny_model_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_model_dir), kv_cache_bytes=32 << 20, window=512, restore="read")


@pytest.fixture(scope="session")
def server_url(engine_config: EngineConfig) -> Iterator[str]:
    options = ServerOptions(port=0, model_name=MODEL, in_process=True)
    with running_server(engine_config, options) as url:
        yield url


@pytest.fixture(scope="session")
def api(server_url: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{server_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def http(server_url: str) -> Iterator[httpx.Client]:
    """Plain HTTP, for what the clients would not send."""
    with httpx.Client(base_url=server_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def dayshift(server_url: str) -> Iterator[DayshiftClient]:
    with DayshiftClient(server_url, timeout_s=60) as client:
        yield client


@pytest.fixture(scope="session")
def gauge(http: httpx.Client) -> Callable[[str], float]:
    """Read one unlabelled number from /metrics."""

    def read(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.split()[0] == name)

    return read
