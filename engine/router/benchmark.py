"""What a router adds to a call: `python -m dayshift.engine.router.benchmark ENGINE_URL`.

Starts a router in front of a running engine and sends the same small calls to both, in turns, each
over a connection of its own that is kept alive.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from statistics import quantiles

import httpx

from dayshift.engine.router.run import RouterOptions, serve_router
from dayshift.processes import start_without_ctrl_c


def main() -> None:
    """Print percentiles of the time of a call, direct and through the router, and of their difference."""
    parser = argparse.ArgumentParser(description="What a router adds to a call, in ms.")
    parser.add_argument("engine_url", help="a running engine without API key")
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    with router_process(arguments.engine_url) as router_url:
        direct, routed = connection_to(arguments.engine_url), connection_to(router_url)
        session_path = f"/v1/sessions/{open_session(routed)}"
        for method, path in (("GET", "/v1/models"), ("POST", f"{session_path}/park")):
            times = measure(
                partial(call, direct, method, path), partial(call, routed, method, path), arguments.calls
            )
            print(f"{method} {path}")
            for label, times_ms in times.items():
                cuts = quantiles(times_ms, n=100)
                print(f"  {label:6}  p10 {cuts[9]:6.3f}  p50 {cuts[49]:6.3f}  p90 {cuts[89]:6.3f} ms")
        call(routed, "DELETE", session_path)


def measure(
    direct: Callable[[], object], routed: Callable[[], object], num_calls: int
) -> dict[str, list[float]]:
    """Times in ms: of direct calls, of routed ones, and what each routed one took longer."""
    for warm_up in (direct, routed) * 20:
        warm_up()
    direct_ms, routed_ms = [], []
    for _ in range(num_calls):
        direct_ms.append(timed_ms(direct))
        routed_ms.append(timed_ms(routed))
    added_ms = [routed - direct for direct, routed in zip(direct_ms, routed_ms, strict=True)]
    return {"direct": direct_ms, "routed": routed_ms, "added": added_ms}


def timed_ms(send: Callable[[], object]) -> float:
    """The time of one call."""
    started = time.perf_counter()
    send()
    return (time.perf_counter() - started) * 1e3


def call(connection: http.client.HTTPConnection, method: str, path: str, body: str | None = None) -> bytes:
    """The reply to one call."""
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    response = connection.getresponse()
    content = response.read()
    if response.status >= 400:
        raise SystemExit(f"{method} {path}: {response.status} {content.decode()}")
    return content


def open_session(connection: http.client.HTTPConnection) -> str:
    """The id of a new session."""
    return json.loads(call(connection, "POST", "/v1/sessions", "{}"))["session_id"]


def connection_to(url: str) -> http.client.HTTPConnection:
    """Opened with the first call."""
    parsed = httpx.URL(url)
    return http.client.HTTPConnection(parsed.host, parsed.port)


@contextmanager
def router_process(engine_url: str) -> Iterator[str]:
    """A router in a process of its own; yields its URL."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_route, args=(engine_url, sender))
    start_without_ctrl_c(process)
    sender.close()
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


def _route(engine_url: str, sender: Connection) -> None:
    serve_router([engine_url], RouterOptions(port=0), on_ready=sender.send)


if __name__ == "__main__":
    main()
