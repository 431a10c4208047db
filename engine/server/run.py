"""Start the HTTP server and its engine, and end both in order."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.app import MAX_BODY_BYTES, create_app
from dayshift.engine.server.gate import is_loopback
from dayshift.engine.server.metrics import Metrics
from dayshift.engine.server.state import ServerState
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
_GRACE_S = 3  # for running responses when the server ends


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the engine is served.

    api_key: needed to listen on other than loopback addresses · model_name: default the folder's
    name or the hub id · in_process: the engine core in a thread instead of a process of its own.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free one
    api_key: str | None = None
    model_name: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    in_process: bool = False


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    api_key: str | None = None,
    model_name: str | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` is given the server's URL once it answers.

    Raises DayshiftError when the address cannot be used or the engine cannot start.
    """
    options = ServerOptions(host=host, port=port, api_key=api_key, model_name=model_name)
    with _listen(options) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_until_signal(config, options, listener, on_ready or (lambda _: None)))


@contextmanager
def running_server(config: EngineConfig, options: ServerOptions | None = None) -> Iterator[str]:
    """A server in a background thread while the context lasts; yields its URL.

    Raises DayshiftError as `serve` does.
    """
    options = options or ServerOptions(port=0)
    loop = uvloop.new_event_loop()
    stop = asyncio.Event()
    ready: Future[str] = Future()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_run_until(stop, config, options, listener, ready.set_result))

    with _listen(options) as listener, ThreadPoolExecutor(1, "dayshift-server") as executor:
        running = executor.submit(run)
        futures: set[Future[Any]] = {ready, running}
        wait(futures, return_when=FIRST_COMPLETED)
        if running.done():
            running.result()  # raises what kept it from starting
        try:
            yield ready.result()
        finally:
            if not running.done():
                loop.call_soon_threadsafe(stop.set)
            running.result()


def _listen(options: ServerOptions) -> socket.socket:
    """Bind before the model is loaded: an address in use should not cost minutes to find out."""
    host, port = options.host, options.port
    if options.api_key is None and not is_loopback(host):
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


class _Server(uvicorn.Server):
    """Signals are handled by `_run_until_signal`, so that the engine is closed in order."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


async def _run_until_signal(
    config: EngineConfig,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await _run_until(stop, config, options, listener, on_ready)


async def _run_until(
    stop: asyncio.Event,
    config: EngineConfig,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    """Start the engine, serve until `stop` is set, and close the engine."""
    running = asyncio.create_task(_run(config, options, listener, on_ready))
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


async def _run(
    config: EngineConfig,
    options: ServerOptions,
    listener: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    engine = await AsyncEngine.start(config, in_process=options.in_process)
    try:
        server = _make_server(engine, config, options)
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
            await serving
    finally:
        await engine.close()


def _make_server(engine: AsyncEngine, config: EngineConfig, options: ServerOptions) -> _Server:
    state = ServerState(
        engine=engine,
        tokenizer=Tokenizer(Path(engine.info.model_folder)),
        model_name=options.model_name or _model_name(config.model),
        metrics=Metrics(),
    )
    app = create_app(state, api_key=options.api_key, max_body_bytes=options.max_body_bytes)
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )


def _model_name(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.is_dir() else model


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
