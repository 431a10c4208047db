"""Start a router, and end it in order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx

from dayshift.engine.router.app import create_app
from dayshift.engine.router.fleet import Fleet
from dayshift.engine.router.health import HealthChecker
from dayshift.engine.server.serving import OnReady, listen, run_until_signal, running, serve_app

DEFAULT_PORT = 8100
# Shorter than the time after which an engine's server closes an idle connection (5 s): a call that
# meets a closing connection could not be told from one that was taken.
_KEEP_ALIVE_S = 2.0
# A machine that is gone without a word is noticed after 10 + 3 x 5 s.
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How a router listens. `api_key` is needed on other than loopback addresses.

    Clients' keys are passed on as they come: the engines behind have the same key, or none.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT  # 0: any free one
    api_key: str | None = None
    more_api_keys: tuple[str, ...] = ()  # of further clients

    @property
    def api_keys(self) -> tuple[str, ...]:
        """All keys that are let in."""
        return self.more_api_keys if self.api_key is None else (self.api_key, *self.more_api_keys)


def serve_router(
    engine_urls: Sequence[str], options: RouterOptions, on_ready: Callable[[str], None] | None = None
) -> None:
    """Route until SIGINT or SIGTERM. `on_ready` is given the router's URL once it answers.

    Raises DayshiftError for an engine's URL that is none, and when the address cannot be used.
    """
    fleet = Fleet(engine_urls)
    with listen_for(options) as listener:
        run_until_signal(
            lambda on_ready: route(fleet, options, listener, on_ready), on_ready or (lambda _: None)
        )


@contextmanager
def running_router(engine_urls: Sequence[str], options: RouterOptions | None = None) -> Iterator[str]:
    """A router in a background thread while the context lasts; yields its URL. Raises as `serve_router`."""
    options = options or RouterOptions(port=0)
    fleet = Fleet(engine_urls)
    with (
        listen_for(options) as listener,
        running(lambda on_ready: route(fleet, options, listener, on_ready), "dayshift-router") as url,
    ):
        yield url


def listen_for(options: RouterOptions) -> socket.socket:
    """The router's socket. Raises DayshiftError as `serve_router`."""
    return listen(options.host, options.port, has_api_key=bool(options.api_keys))


async def route(fleet: Fleet, options: RouterOptions, listener: socket.socket, on_ready: OnReady) -> None:
    """Route until cancelled."""
    limits = httpx.Limits(
        max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_S
    )
    async with httpx.AsyncHTTPTransport(
        limits=limits, trust_env=False, socket_options=_SOCKET_OPTIONS
    ) as transport:
        checker = HealthChecker(fleet, transport)
        await checker.check_all()
        watching = asyncio.create_task(checker.watch())
        try:
            await serve_app(create_app(fleet, transport, api_keys=options.api_keys), listener, on_ready)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
