"""Requests that schemathesis makes up from our own OpenAPI document: no 500, no hang, errors as OpenAI's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from tests.engine.dialect_models import make_dialect_model

_TIMEOUT_S = 60
# Draining ends the server for good.
_LEFT_OUT = r"^/v1/drain$"


@pytest.fixture(scope="module")
def fuzzed_url(make_tiny_model: Callable[..., Path]) -> Iterator[str]:
    """A model of few positions: whatever is asked for ends soon."""
    folder = make_dialect_model(make_tiny_model, "qwen", max_position_embeddings=192)
    config = EngineConfig(model=str(folder), kv_cache_bytes=4 << 20, window=128)
    with running_server(config, ServerOptions(port=0, in_process=True)) as url:
        yield url


@pytest.fixture(scope="module")
def operations(fuzzed_url: str) -> list[Any]:
    document = httpx.get(f"{fuzzed_url}/openapi.json").json()
    found = schemathesis.openapi.from_dict(document).exclude(path_regex=_LEFT_OUT).get_all_operations()
    return [operation.ok() for operation in found]  # type: ignore[union-attr]


def fuzz(operations: list[Any], url: str, num_examples: int) -> None:
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck))  # type: ignore[arg-type]
        def run(case: schemathesis.Case) -> None:
            response = case.call(base_url=url, timeout=_TIMEOUT_S)
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                error = response.json()["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert "\n" not in error["message"]

        run()


def test_every_endpoint_is_in_the_document(operations: list[Any]):
    paths = {operation.path for operation in operations}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/sessions"} <= paths


def test_no_request_breaks_the_server(operations: list[Any], fuzzed_url: str):
    fuzz(operations, fuzzed_url, num_examples=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_of_many_breaks_the_server(operations: list[Any], fuzzed_url: str):
    fuzz(operations, fuzzed_url, num_examples=300)
