"""The FastAPI app of one engine."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from dayshift.engine.server import openai_routes, session_routes
from dayshift.engine.server.errors import install_error_handlers
from dayshift.engine.server.gate import Gate, ResponseCounter
from dayshift.engine.server.state import ServerState, State

MAX_BODY_BYTES = 16 << 20


def create_app(
    state: ServerState, *, api_key: str | None = None, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """All routes for `state`; with `api_key`, every one but /health asks for it."""
    app = FastAPI(title="Dayshift", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = state
    app.include_router(openai_routes.router)
    app.include_router(session_routes.router)
    app.add_api_route("/health", health)
    app.add_api_route("/metrics", metrics)
    install_error_handlers(app)
    app.add_middleware(Gate, api_key=api_key, max_body_bytes=max_body_bytes)
    app.add_middleware(ResponseCounter, metrics=state.metrics)
    return app


async def health(state: State) -> Response:
    """200 while the engine core works, 503 with the reason when it has ended."""
    failure = state.engine.failure
    if failure is None:
        return JSONResponse({"status": "ok", "model": state.model_name})
    return JSONResponse({"status": "dead", "reason": failure}, 503)


async def metrics(state: State) -> Response:
    """Prometheus text format."""
    return Response(state.metrics.render(await state.engine.stats()), media_type=CONTENT_TYPE_LATEST)
