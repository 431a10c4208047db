"""Texts far beyond what fits: refused from their beginning, so that nobody waits while they are encoded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.tokenizer import Tokenizer

LONG = "a b " * 250_000
WINDOW = 256


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Characters of each text that is encoded from now on, in any thread of this process."""
    found: list[int] = []
    encode = Tokenizer.encode

    def note(self: Tokenizer, text: str, **options: Any) -> list[int]:
        found.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", note)
    return found


@pytest.fixture(scope="module")
def url(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = EngineConfig(model=str(tiny_model_dir), device="cpu", kv_cache_bytes=8 << 20)
    config = replace(config, store_dir=tmp_path_factory.mktemp("store"))
    with running_server(config, ServerOptions(port=0, in_process=True)) as url:
        session = {"session_id": "robot", "system": "You lead.", "window": WINDOW}
        httpx.post(f"{url}/v1/sessions", json=session).raise_for_status()
        yield url


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/sessions", {"session_id": "other", "system": LONG, "window": WINDOW}),
        ("/v1/sessions/robot/turns", {"text": LONG}),
    ],
)
def test_a_text_far_too_long_is_refused_without_being_encoded(
    url: str, lengths: list[int], path: str, body: dict[str, Any]
) -> None:
    reply = httpx.post(url + path, json=body, timeout=60)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    assert re.search(r"more than (\d+) tokens.* \d+", error["message"])
    assert 0 < sum(lengths) < len(LONG) / 10
    assert httpx.post(f"{url}/v1/sessions/robot/turns", json={"text": "Go on.", "max_tokens": 2}).is_success
