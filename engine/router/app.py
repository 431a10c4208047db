"""The ASGI app of a router."""

from __future__ import annotations

from contextlib import suppress

import httpx
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import Receive, Scope, Send

from dayshift.engine.router.call import read_call
from dayshift.engine.router.fanout import engine_metrics, join_traces, list_policies, list_sessions
from dayshift.engine.router.fleet import Fleet
from dayshift.engine.router.forwarder import Forwarder
from dayshift.engine.router.metrics import RouterMetrics
from dayshift.engine.router.sockets import SocketForwarder
from dayshift.engine.server.app import MAX_BODY_BYTES
from dayshift.engine.server.errors import install_error_handlers
from dayshift.engine.server.gate import Gate
from dayshift.engine.server.streaming import ClientGoneError, while_connected


def create_app(
    fleet: Fleet, transport: httpx.AsyncBaseTransport, *, api_keys: tuple[str, ...] = ()
) -> Starlette:
    """All routes of a router; with `api_keys`, every one but /health asks for one of them."""
    metrics = RouterMetrics()

    async def health(_: Request) -> Response:
        """200 while an engine takes work."""
        num_ready, num_engines = len(fleet.ready), len(fleet.engines)
        if num_ready:
            return JSONResponse({"status": "ok", "num_engines": num_engines, "num_ready": num_ready})
        return JSONResponse({"status": "dead", "reason": f"none of {num_engines} engines takes work"}, 503)

    async def engines(_: Request) -> Response:
        """Each engine as the router sees it."""
        return JSONResponse(
            {
                "engines": [
                    {
                        "url": engine.name,
                        "state": engine.state,
                        "reason": engine.reason,
                        "num_in_flight": engine.num_in_flight,
                        "num_sessions": engine.num_sessions,
                    }
                    for engine in fleet.engines
                ]
            }
        )

    async def all_metrics(request: Request) -> Response:
        """The router's own numbers, and the engines' added up, latencies included."""
        totals, counted = await engine_metrics(await read_call(request), fleet, transport)
        return Response(metrics.render(fleet, totals, counted), media_type=CONTENT_TYPE_LATEST)

    async def sessions(request: Request) -> Response:
        return await list_sessions(await read_call(request), fleet, transport)

    async def policies(request: Request) -> Response:
        return await list_policies(await read_call(request), fleet, transport)

    async def trace(request: Request) -> Response:
        return await join_traces(await read_call(request), fleet, transport)

    sockets = SocketForwarder(fleet, transport)
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", all_metrics),
            Route("/v1/engines", engines),
            Route("/v1/sessions", sessions),
            Route("/v1/policies", policies),
            Route("/v1/trace", trace),
            WebSocketRoute("/{path:path}", sockets.join),
            Route("/{path:path}", _PassOn(Forwarder(fleet, transport, metrics))),
        ],
        middleware=[Middleware(Gate, api_keys=api_keys, max_body_bytes=MAX_BODY_BYTES)],
    )
    install_error_handlers(app)
    return app


class _PassOn:
    """ASGI app: every call that is not the router's own goes to an engine, while its client is there."""

    def __init__(self, forwarder: Forwarder) -> None:
        self._forwarder = forwarder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        call = await read_call(request)
        with suppress(ClientGoneError):  # nobody is left to be told
            await while_connected(request, self._forwarder.forward(call, send))
