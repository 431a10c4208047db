"""GET /v1/sessions of a whole fleet."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
from starlette.responses import Response

from dayshift.engine.router.call import Call
from dayshift.engine.router.fleet import EngineLink, EngineState, Fleet
from dayshift.engine.router.forwarder import NoEngineReadyError
from dayshift.engine.router.health import describe, mark


async def list_sessions(call: Call, fleet: Fleet, transport: httpx.AsyncBaseTransport) -> Response:
    """The sessions of all engines that take work, each once.

    Every engine reads all sessions of a shared store; the one that has a session open knows best
    what it is doing. An engine's error is passed on. Raises NoEngineReadyError.
    """

    async def ask(engine: EngineLink) -> httpx.Response | None:
        try:
            response = await transport.handle_async_request(call.request_to(engine.url))
            await response.aread()
        except httpx.RequestError as error:
            mark(engine, EngineState.UNREACHABLE, describe(error))
            return None
        return response

    responses = [response for response in await asyncio.gather(*map(ask, fleet.ready)) if response]
    if not responses:
        raise NoEngineReadyError(fleet)
    for response in responses:
        if response.is_error:
            content_type = response.headers.get("content-type")
            return Response(response.content, response.status_code, media_type=content_type)
    lists = [msgspec.json.decode(response.content)["sessions"] for response in responses]
    body = {"sessions": merged([info for infos in lists for info in infos])}
    return Response(msgspec.json.encode(body), media_type="application/json")


def merged(infos: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """SessionInfos as JSON holds them, each session once, by id: as the engine that uses it says."""
    by_id: dict[str, dict[str, Any]] = {}
    for info in infos:
        known = by_id.setdefault(info["session_id"], info)
        if _liveness(info) > _liveness(known):
            by_id[info["session_id"]] = info
    return [by_id[session_id] for session_id in sorted(by_id)]


def _liveness(info: dict[str, Any]) -> tuple[bool, bool]:
    return info["is_busy"], not info["is_parked"]
