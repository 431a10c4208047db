"""Websockets of policies: each is joined to one of an engine that serves the policy.

A connection stays with its engine. When that ends, the client's is closed, and its next one comes to another.
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress

import httpx
import msgspec
from starlette.datastructures import Headers
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from dayshift.engine.router.fleet import EngineLink, EngineState, Fleet, one_in_flight
from dayshift.engine.router.health import describe, mark

logger = logging.getLogger(__name__)

_SOCKET_PATH = re.compile(r"/v1/policies/(?P<policy>[^/]+)/[^/]+")
_KEY_HEADERS = ("authorization", "api-key", "x-api-key")
_TIMEOUT_S = 2.0
_TIMEOUTS = {"connect": _TIMEOUT_S, "read": _TIMEOUT_S, "write": _TIMEOUT_S, "pool": _TIMEOUT_S}

# Close codes of RFC 6455 and IANA's list.
_NORMAL, _POLICY_VIOLATION, _INTERNAL_ERROR, _SERVICE_RESTART, _TRY_AGAIN_LATER = 1000, 1008, 1011, 1012, 1013
_NEVER_SENT = {1005: _NORMAL, 1006: _SERVICE_RESTART}  # no code came; the connection broke


class SocketForwarder:
    """Finds the engine for each websocket."""

    def __init__(self, fleet: Fleet, transport: httpx.AsyncBaseTransport) -> None:
        self._fleet = fleet
        self._transport = transport

    async def join(self, socket: WebSocket) -> None:
        """Join a client's websocket to an engine's, until one of both ends."""
        for engine in await self._candidates(socket):
            try:
                joined = await connect(
                    _address(engine, socket),
                    additional_headers=_keys(socket.headers),
                    compression=None,
                    max_size=None,  # the engine is trusted
                    open_timeout=_TIMEOUT_S,
                    proxy=None,
                )
            except InvalidStatus as error:  # it answers: the path or the key is wrong
                logger.info("%s refused a websocket: %s", engine.name, describe(error))
                await socket.close(_POLICY_VIOLATION)  # before it is accepted: 403
                return
            except (OSError, InvalidHandshake, TimeoutError) as error:
                mark(engine, EngineState.UNREACHABLE, describe(error))
                continue
            async with joined:
                with one_in_flight(engine):
                    await socket.accept()
                    await _join(socket, joined)
            return
        await socket.accept()
        await socket.close(_TRY_AGAIN_LATER, "no engine takes the connection; try later")

    async def _candidates(self, socket: WebSocket) -> list[EngineLink]:
        """The engines that serve the policy, with the fewest calls first; if none does, one that says so.

        A path without a policy is for an engine with only one.
        """
        match = _SOCKET_PATH.fullmatch(socket.scope["path"])
        policy = None if match is None else match["policy"]
        ready = self._fleet.for_policy(policy)
        served = await asyncio.gather(*(self._policies_of(engine, socket) for engine in ready))
        fitting = [
            engine
            for engine, names in zip(ready, served, strict=True)
            if (len(names) == 1 if policy is None else policy in names)
        ]
        return fitting or ready[:1]

    async def _policies_of(self, engine: EngineLink, socket: WebSocket) -> list[str]:
        request = httpx.Request(
            "GET",
            engine.url.copy_with(raw_path=b"/v1/policies"),
            headers=_keys(socket.headers),
            extensions={"timeout": _TIMEOUTS},
        )
        try:
            response = await self._transport.handle_async_request(request)
            body = await response.aread()
        except httpx.RequestError as error:
            mark(engine, EngineState.UNREACHABLE, describe(error))
            return []
        if response.is_error:
            return []
        return [policy["name"] for policy in msgspec.json.decode(body)["policies"]]


def _address(engine: EngineLink, socket: WebSocket) -> str:
    path, query = socket.scope["raw_path"], socket.scope["query_string"]
    scheme = {"http": "ws", "https": "wss"}[engine.url.scheme]
    return str(engine.url.copy_with(scheme=scheme, raw_path=path + (b"?" + query if query else b"")))


def _keys(headers: Headers) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name in _KEY_HEADERS]


async def _join(client: WebSocket, engine: ClientConnection) -> None:
    """Pass messages both ways; when one side ends, the other is told with the same words."""

    async def from_client() -> None:
        while (message := await client.receive())["type"] == "websocket.receive":
            data = message.get("bytes")
            await engine.send(message["text"] if data is None else data)

    async def from_engine() -> None:
        async for message in engine:
            await (client.send_text(message) if isinstance(message, str) else client.send_bytes(message))

    ways = [asyncio.create_task(from_client()), asyncio.create_task(from_engine())]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        has_client_gone = ways[0].done() and ways[0].exception() is None
    finally:
        for way in ways:
            way.cancel()
        results = await asyncio.gather(*ways, return_exceptions=True)
    for error in results:
        if error is not None and not isinstance(error, asyncio.CancelledError | ConnectionClosed):
            raise error
    if not has_client_gone:
        code = _NEVER_SENT.get(engine.close_code or _INTERNAL_ERROR, engine.close_code or _INTERNAL_ERROR)
        with suppress(RuntimeError):  # both ended at once
            await client.close(code, engine.close_reason or "the engine's connection ended")
