"""The FastAPI app of one engine."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from dayshift.engine.server import (
    openai_routes,
    openpi_socket,
    policy_routes,
    response_routes,
    session_routes,
    vla_eval_socket,
)
from dayshift.engine.server.errors import install_error_handlers
from dayshift.engine.server.gate import Gate, ResponseCounter
from dayshift.engine.server.state import ServerState, State

MAX_BODY_BYTES = 16 << 20


def create_app(
    state: ServerState, *, api_keys: Collection[str] = (), max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """All routes for `state`; with `api_keys`, every one but /health asks for one of them."""
    app = FastAPI(
        title="Dayshift",
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
    )
    app.state.server = state
    app.include_router(openai_routes.router)
    app.include_router(response_routes.router)
    app.include_router(session_routes.router)
    for routes in (policy_routes, openpi_socket, vla_eval_socket):
        app.include_router(routes.router)
    app.add_api_route("/health", health)
    app.add_api_route("/v1/drain", drain, methods=["POST"])
    app.add_api_route("/metrics", metrics)
    app.add_api_route("/v1/trace", trace)
    install_error_handlers(app)
    app.add_middleware(Gate, api_keys=api_keys, max_body_bytes=max_body_bytes, limits=state.limits)
    app.add_middleware(ResponseCounter, metrics=state.metrics)
    return app


async def health(state: State) -> Response:
    """200 while the engine takes work; 503 when its core has ended (with the reason), or it drains."""
    failure = state.engine.failure
    if failure is not None:
        return JSONResponse({"status": "dead", "reason": failure}, 503)
    if state.engine.is_draining:
        return JSONResponse({"status": "draining", "model": state.model_name}, 503)
    return JSONResponse({"status": "ok", "model": state.model_name})


async def drain(state: State) -> Response:
    """Release every session for other engines on the same store, and take no more work.

    Running calls are finished. It is done when `dayshift_engine_num_open_sessions` is 0.
    """
    await state.engine.drain()
    return JSONResponse({"status": "draining"}, 202)


async def trace(state: State, cursor: str = "") -> Response:
    """What happened to requests since a cursor: `{"traces": [EngineTrace]}`, of a router one per engine."""
    found = await state.engine.trace(cursor)
    return Response(msgspec.json.encode({"traces": [found]}), media_type="application/json")


async def metrics(state: State) -> Response:
    """Prometheus text format."""
    return Response(state.metrics.render(await state.engine.stats()), media_type=CONTENT_TYPE_LATEST)
