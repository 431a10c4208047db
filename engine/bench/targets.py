"""Where the serving benchmarks send their requests: any OpenAI-compatible server, or an engine right here.

Prompts are token ids, `ignore_eos` is set, and replies are streamed, so that every server computes
the same. Times are taken by the client; what arrives is read only afterwards.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import uvloop

from dayshift.engine.api import GenerateRequest, SamplingParams
from dayshift.engine.bench.http_stream import HttpConnection
from dayshift.types import DayshiftError

if TYPE_CHECKING:  # torch, which a client does not need
    from dayshift.engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One request: a prompt of token ids, and how many tokens to generate.

    `after`: it is sent when every request without `after` has got this many tokens.
    """

    prompt: Sequence[int]
    num_tokens: int
    temperature: float = 0.0
    after: int | None = None


@dataclass(slots=True)
class Reply:
    """When a request was sent, and when its tokens came: (seconds, tokens so far)."""

    sent_at: float
    marks: list[tuple[float, int]] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float:
        return (self.marks[0][0] - self.sent_at) * 1e3


class Target(Protocol):
    """Takes all requests at once and returns when all are answered."""

    def run(self, loads: Sequence[Load]) -> list[Reply]: ...


class HttpTarget:
    """A server's /v1/completions.

    Raises DayshiftError when the server cannot be reached, or refuses, with its own words.
    """

    def __init__(self, url: str, model: str, api_key: str | None = None) -> None:
        self.url, self.model = url.rstrip("/"), model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def run(self, loads: Sequence[Load]) -> list[Reply]:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(self._run(loads))

    async def _run(self, loads: Sequence[Load]) -> list[Reply]:
        gates = [_Gate(load.after or 0) for load in loads]
        first = [gate for gate, load in zip(gates, loads, strict=True) if load.after is None]
        for gate, load in zip(gates, loads, strict=True):
            gate.waits_for = [] if load.after is None else first
        return await asyncio.gather(*map(self._stream, loads, gates))

    async def _stream(self, load: Load, gate: _Gate) -> Reply:
        while any(other.num_events < gate.after for other in gate.waits_for):
            await asyncio.sleep(0.001)
        body = {
            "model": self.model,
            "prompt": list(load.prompt),
            "max_tokens": load.num_tokens,
            "temperature": load.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        content = json.dumps(body).encode()
        async with aclosing(await HttpConnection.open(self.url, self._headers)) as connection:
            # As from a client that keeps its connections: the server has taken it in before.
            await connection.request("GET", "/v1/models")
            reply = Reply(time.perf_counter())
            response = await connection.request("POST", "/v1/completions", content, gate.count)
        if response.status != 200:
            text = " ".join(response.text.split())
            raise DayshiftError(f"{self.url} answered {response.status}: {text[:300]}")
        reply.marks = _marks(response.parts)
        return reply


@dataclass(slots=True)
class _Gate:
    """How far a request is, and for which others it waits."""

    after: int
    num_events: int = 0
    waits_for: list[_Gate] = field(default_factory=list)

    def count(self, part: bytes) -> None:
        """A part of the reply has come."""
        self.num_events += part.count(b"data: {")


def _marks(arrived: Sequence[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """Tokens so far at each arrival: from the running usage, else one for each event with text."""
    marks: list[tuple[float, int]] = []
    buffer, count = b"", 0
    for seconds, part in arrived:
        *lines, buffer = (buffer + part).split(b"\n")
        before = count
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or {}
            count = usage.get("completion_tokens", count + 1 if event.get("choices") else count)
        if count > before:
            marks.append((seconds, count))
    return marks


class EngineTarget:
    """An engine in this process, stepped here: what the server adds is not in its times."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def run(self, loads: Sequence[Load]) -> list[Reply]:
        ids = {uuid.uuid4().hex: load for load in loads}
        waiting = {request_id: load for request_id, load in ids.items() if load.after is not None}
        first = [request_id for request_id in ids if request_id not in waiting]
        replies: dict[str, Reply] = {}
        counts = dict.fromkeys(ids, 0)
        for request_id in first:
            replies[request_id] = self._submit(request_id, ids[request_id])
        while self.engine.has_work or waiting:
            least = min(counts[request_id] for request_id in first)
            for request_id, load in list(waiting.items()):
                if least >= (load.after or 0):
                    replies[request_id] = self._submit(request_id, load)
                    del waiting[request_id]
            for chunk in self.engine.step():
                if chunk.error is not None:
                    raise DayshiftError(f"the engine failed a request: {chunk.error}")
                counts[chunk.request_id] += len(chunk.token_ids)
                replies[chunk.request_id].marks.append((time.perf_counter(), counts[chunk.request_id]))
        return [replies[request_id] for request_id in ids]

    def _submit(self, request_id: str, load: Load) -> Reply:
        reply = Reply(time.perf_counter())
        sampling = SamplingParams(max_tokens=load.num_tokens, temperature=load.temperature, ignore_eos=True)
        self.engine.submit(
            GenerateRequest(request_id=request_id, prompt_token_ids=tuple(load.prompt), sampling=sampling)
        )
        return reply
