"""How long a server takes from its command to its first token, and to its tenth request's."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO

import httpx

from dayshift.engine.bench.serving import Prompts
from dayshift.engine.bench.targets import HttpTarget, Load
from dayshift.types import DayshiftError

_READY = re.compile(r"serving .* on (http://\S+)")
_GAUGE = re.compile(r"^dayshift_engine_startup_(?:(\w+)_)?s (\S+)$", re.MULTILINE)
_END_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """Seconds from the command until the server answered and until the first token came; the parts of the
    engine's own start, as in `StartupTimes`; and milliseconds to the first token of each request."""

    ready_s: float
    first_token_s: float
    parts_s: Mapping[str, float]  # "total" among them
    ttft_ms: tuple[float, ...]


def measure_startup(
    serve: Sequence[str],
    *,
    environment: Mapping[str, str],
    vocab_size: int,
    num_requests: int,
    prompt: int,
    timeout_s: float,
) -> Startup:
    """Start `dayshift` with the arguments `serve`, in a process of its own, and send one request after the
    other, each of a fresh prompt of so many tokens.

    Raises DayshiftError with the server's last line if it ends or is not ready in time.
    """
    began_at = time.monotonic()
    with _server(serve, environment, timeout_s) as url:
        ready_s = time.monotonic() - began_at
        httpx.get(f"{url}/health").raise_for_status()  # loads the client's own libraries, too
        target, prompts = HttpTarget(url, "bench"), Prompts(vocab_size, time.time_ns())
        ttft_ms: list[float] = []
        first_token_s = 0.0
        for index in range(num_requests):
            (reply,) = target.run([Load(prompt=prompts.make(prompt), num_tokens=1)])
            ttft_ms.append(reply.ttft_ms)
            if index == 0:
                first_token_s = time.monotonic() - began_at
        metrics = httpx.get(f"{url}/metrics").text
    parts = {name or "total": float(value) for name, value in _GAUGE.findall(metrics)}
    return Startup(ready_s=ready_s, first_token_s=first_token_s, parts_s=parts, ttft_ms=tuple(ttft_ms))


@contextmanager
def _server(serve: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> Iterator[str]:
    """The URL of a server that answers; it is ended when the context is left."""
    said: SimpleQueue[str | None] = SimpleQueue()
    with subprocess.Popen(
        [sys.executable, "-m", "dayshift", *serve],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        # Reads to the end, so that the server never waits for a reader.
        reader = Thread(target=_read, args=(process.stderr, said))
        reader.start()
        try:
            yield _url(said, timeout_s)
        finally:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            reader.join()


def _read(lines: IO[str], said: SimpleQueue[str | None]) -> None:
    for line in lines:
        said.put(line)
    said.put(None)


def _url(said: SimpleQueue[str | None], timeout_s: float) -> str:
    """What the server says that it serves on."""
    ends_at, last = time.monotonic() + timeout_s, "nothing"
    while True:
        try:
            line = said.get(timeout=max(0.0, ends_at - time.monotonic()))
        except Empty:
            raise DayshiftError(f"the server was not ready in {timeout_s:.0f} s; it said: {last}") from None
        if line is None:
            raise DayshiftError(f"the server ended before it was ready; it said: {last}")
        if (match := _READY.search(line)) is not None:
            return match[1]
        last = line.strip() or last
