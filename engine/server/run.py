"""Start the HTTP server and its engine, and end both in order."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI

from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.config import EngineConfig
from dayshift.engine.dialects import find_dialect
from dayshift.engine.server.app import MAX_BODY_BYTES, create_app
from dayshift.engine.server.limits import NO_LIMITS, Limits, raise_open_files_limit
from dayshift.engine.server.metrics import Metrics
from dayshift.engine.server.response_store import ResponseStore
from dayshift.engine.server.serving import OnReady, listen, run_until_signal, running, serve_app
from dayshift.engine.server.state import ServerState
from dayshift.engine.startup import StartupTimes
from dayshift.engine.tokenizer import Tokenizer
from dayshift.engine.wire import ServerClosingError

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
RESPONSES_FILE = "responses.sqlite"  # in the sessions' store


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the engine is served.

    api_key: needed to listen on other than loopback addresses · more_api_keys: of further clients,
    each with limits of its own · model_name: default the folder's name or the hub id · in_process: the
    engine core in a thread instead of a process of its own · on_started: is told how long the start took.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free one
    api_key: str | None = None
    more_api_keys: tuple[str, ...] = ()
    model_name: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    limits: Limits = NO_LIMITS
    in_process: bool = False
    on_started: Callable[[StartupTimes], None] | None = None

    @property
    def api_keys(self) -> tuple[str, ...]:
        """All keys that are let in."""
        return self.more_api_keys if self.api_key is None else (self.api_key, *self.more_api_keys)


def serve(
    config: EngineConfig,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    api_key: str | None = None,
    model_name: str | None = None,
    more_api_keys: tuple[str, ...] = (),
    limits: Limits = NO_LIMITS,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` is given the server's URL once it answers.

    Raises DayshiftError when the address cannot be used or the engine cannot start.
    """
    options = ServerOptions(
        host=host,
        port=port,
        api_key=api_key,
        more_api_keys=more_api_keys,
        model_name=model_name,
        limits=limits,
    )
    serve_until_signal(config, options, on_ready)


def serve_until_signal(
    config: EngineConfig, options: ServerOptions, on_ready: Callable[[str], None] | None = None
) -> None:
    """The same with the options as one object."""

    def on_ready_for_long(url: str) -> None:
        # What was loaded stays: Python's collector would look through all of it now and then, and every
        # stream would wait that long.
        gc.freeze()
        if on_ready is not None:
            on_ready(url)

    raise_open_files_limit()
    with _listen(options) as listener:
        run_until_signal(lambda on_ready: _run(config, options, listener, on_ready), on_ready_for_long)


@contextmanager
def running_server(config: EngineConfig, options: ServerOptions | None = None) -> Iterator[str]:
    """A server in a background thread while the context lasts; yields its URL.

    Raises DayshiftError as `serve` does.
    """
    options = options or ServerOptions(port=0)
    with (
        _listen(options) as listener,
        running(lambda on_ready: _run(config, options, listener, on_ready), "dayshift-server") as url,
    ):
        yield url


def _listen(options: ServerOptions) -> socket.socket:
    """Bind before the model is loaded: an address in use should not cost minutes to find out."""
    return listen(options.host, options.port, has_api_key=bool(options.api_keys))


async def _run(
    config: EngineConfig, options: ServerOptions, listener: socket.socket, on_ready: OnReady
) -> None:
    engine = await AsyncEngine.start(config, in_process=options.in_process)
    if options.on_started is not None:
        options.on_started(engine.info.startup)
    try:
        with closing(ResponseStore(config.store_dir and config.store_dir / RESPONSES_FILE)) as responses:
            app = _make_app(engine, responses, config, options)
            over = ServerClosingError("the server is told to end; the call was not over and is rolled back")
            await serve_app(app, listener, on_ready, end_calls=lambda: engine.end_calls(over))
    finally:
        await engine.close()


def _make_app(
    engine: AsyncEngine, responses: ResponseStore, config: EngineConfig, options: ServerOptions
) -> FastAPI:
    tokenizer = Tokenizer(Path(engine.info.model_folder))
    if tokenizer.session_refusal is not None:
        logger.warning("this model has no sessions: %s", tokenizer.session_refusal)
    elif engine.info.max_context_tokens < config.window:
        logger.warning(
            "sessions have a window of %d tokens unless they say, not %d: the engine can hold no more",
            engine.info.max_context_tokens,
            config.window,
        )
    state = ServerState(
        engine=engine,
        tokenizer=tokenizer,
        dialect=find_dialect(tokenizer),
        model_name=options.model_name or _model_name(config.model),
        metrics=Metrics(),
        responses=responses,
        limits=options.limits,
    )
    return create_app(state, api_keys=options.api_keys, max_body_bytes=options.max_body_bytes)


def _model_name(model: str) -> str:
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
