"""Serving an app on a socket: what the engine's server and the router have in common."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import uvicorn
import uvloop
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp

from dayshift.engine.server.gate import is_loopback
from dayshift.processes import when_asked_to_end
from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)

OnReady = Callable[[str], None]
"""Is given the server's URL once it answers."""

Main = Callable[[OnReady], Coroutine[Any, Any, None]]
"""Serves until it is cancelled."""

_MAX_MESSAGE_BYTES = 16 << 20  # of a websocket
_THREAD_START_S = 5  # for a new thread to run; one that has not by then was never started
_GRACE_S = 3  # for running responses when the server ends
_LAST_WORDS_S = 1  # of these, for telling clients that their calls were not over in time


def listen(host: str, port: int, *, has_api_key: bool) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises DayshiftError for an address that cannot be used, or needs an API key and has none.
    """
    if not has_api_key and not is_loopback(host):
        raise DayshiftError(
            f"listening on {host} needs an API key; without one only loopback addresses "
            "(127.0.0.1, ::1, localhost) are allowed"
        )
    if not 0 <= port <= 65535:
        raise DayshiftError(f"port {port} is not allowed; it must be from 0 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise DayshiftError(f"address {host}, port {port} {reason}; give another port") from error


def run_until_signal(main: Main, on_ready: OnReady) -> None:
    """Run `main` until it ends, or until SIGINT, SIGTERM or SIGHUP."""

    async def run() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        with when_asked_to_end(lambda: loop.call_soon_threadsafe(stop.set)):
            await _run_until(stop, main, on_ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


@contextmanager
def running(main: Main, name: str) -> Iterator[str]:
    """`main` in a background thread of this name while the context lasts; yields its URL."""
    loop = uvloop.new_event_loop()
    stop = asyncio.Event()
    ready: Future[str] = Future()
    begun, ended = threading.Event(), Future[None]()

    def run() -> None:
        begun.set()
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(_run_until(stop, main, ready.set_result))
        except BaseException as error:  # noqa: BLE001  raised again where the context ends
            ended.set_exception(error)
        else:
            ended.set_result(None)

    # No executor: an interrupt while it starts its thread makes it forget the thread, which goes on.
    thread = threading.Thread(target=run, name=name)
    try:
        thread.start()
        futures: set[Future[Any]] = {ready, ended}
        wait(futures, return_when=FIRST_COMPLETED)
        if ended.done():
            ended.result()  # raises what kept it from starting
        yield ready.result()
    finally:
        if begun.wait(_THREAD_START_S):
            if not ended.done():
                loop.call_soon_threadsafe(stop.set)
            ended.result()


async def serve_app(
    app: ASGIApp,
    listener: socket.socket,
    on_ready: OnReady,
    end_calls: Callable[[], None] | None = None,
) -> None:
    """Serve until cancelled; running responses then have a few seconds to end. `end_calls` is called when
    these are nearly over, to end what is not: afterwards connections are just closed."""
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="websockets-sansio",
            ws_max_size=_MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    await run_in_threadpool(int)  # loads what streams run on, which the first of them would wait for
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        url = _url(listener)
        logger.info("serving on %s", url)
        on_ready(url)
        await asyncio.shield(serving)
    finally:
        server.should_exit = True
        if end_calls is not None:
            asyncio.get_running_loop().call_later(_GRACE_S - _LAST_WORDS_S, end_calls)
        await serving


class _Server(uvicorn.Server):
    """Signals are handled by `run_until_signal`, so that everything is closed in order."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


async def _run_until(stop: asyncio.Event, main: Main, on_ready: OnReady) -> None:
    running = asyncio.create_task(main(on_ready))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    is_stopped = stopping.done()
    stopping.cancel()
    if is_stopped:
        running.cancel()
    try:
        await running
    except asyncio.CancelledError:
        if not is_stopped:
            raise


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
