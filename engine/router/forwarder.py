"""Passes calls on to engines, and their replies back, byte for byte."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

import httpx
from starlette.types import Send

from dayshift.engine.router.call import (
    DRAINING,
    LOCKED,
    NOT_FOUND,
    OVERLOADED,
    POLICY_NOT_FOUND,
    Call,
    CallKind,
    Headers,
    error_code_in,
    response_headers,
    session_id_in,
)
from dayshift.engine.router.fleet import EngineLink, EngineState, Fleet, one_in_flight
from dayshift.engine.router.health import describe, mark
from dayshift.engine.router.metrics import RouterMetrics
from dayshift.engine.server.errors import error_body
from dayshift.engine.server.streaming import event
from dayshift.engine.wire import EngineUnreachableError

logger = logging.getLogger(__name__)

HANDOVER_S = 10.0
"""How long a call waits for its session's file while the engine that has it open lets go of it."""
_HANDOVER_POLL_S = 0.05
_EVENT_END = b"\n\n"


class NoEngineReadyError(EngineUnreachableError):
    """No engine takes calls at the moment; this one was not taken."""

    def __init__(self, fleet: Fleet) -> None:
        states = ", ".join(f"{engine.name} is {engine.state}" for engine in fleet.engines)
        super().__init__(f"no engine takes the call: {states}; try later")


class LostReplyError(EngineUnreachableError):
    """The connection to an engine broke after it had got a call, which may have been taken."""

    status = 502


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an engine did not take a call; its response, if it gave one."""

    code: str
    status: int = 503
    headers: Headers | None = None
    body: bytes = b""


class Forwarder:
    """Finds the engine for each call. Sends a call twice only if it was not taken the first time."""

    def __init__(self, fleet: Fleet, transport: httpx.AsyncBaseTransport, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._transport = transport
        self._metrics = metrics

    async def forward(self, call: Call, send: Send) -> None:
        """Have a call answered by the first engine that takes it.

        A session that another engine has open still is waited for: an engine that drains, or whose
        front was killed, writes its sessions before it lets go of them.

        Raises NoEngineReadyError; LostReplyError, if no byte of a reply has come.
        """
        deadline = time.monotonic() + HANDOVER_S
        while True:
            refusals: list[Refusal] = []
            for engine in self._candidates(call):
                refusal = await self._ask(engine, call, send)
                if refusal is None:
                    return
                refusals.append(refusal)
            if any(refusal.code == LOCKED for refusal in refusals) and time.monotonic() < deadline:
                await asyncio.sleep(_HANDOVER_POLL_S)
                continue
            await self._refuse(refusals, send)
            return

    def _candidates(self, call: Call) -> list[EngineLink]:
        if call.kind is CallKind.STATELESS:
            return self._fleet.for_stateless()
        if call.kind is CallKind.POLICY:
            return self._fleet.for_policy(call.policy)
        return self._fleet.for_session(call.session_id)

    async def _ask(self, engine: EngineLink, call: Call, send: Send) -> Refusal | None:
        """Send a call to one engine and pass its reply on; its refusal if it did not take the call."""
        with one_in_flight(engine):
            try:
                response = await self._transport.handle_async_request(call.request_to(engine.url))
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                mark(engine, EngineState.UNREACHABLE, describe(error))
                return self._untaken(engine, Refusal("unreachable"))
            except httpx.TransportError as error:
                return self._lost(engine, call, error)
            async with aclosing(response):
                return await self._pass_on(engine, call, response, send)

    async def _pass_on(
        self, engine: EngineLink, call: Call, response: httpx.Response, send: Send
    ) -> Refusal | None:
        status, headers = response.status_code, response_headers(response)
        is_whole = response.is_error or (call.creates_session and response.is_success)
        if not is_whole:
            self._note_session(engine, call.session_id, call)
            self._metrics.count_response(engine, status)
            await self._stream(engine, response, headers, send)
            return None
        try:
            body = b"".join([part async for part in _parts(response)])
        except httpx.TransportError as error:
            return self._lost(engine, call, error)
        if response.is_error and call.is_untaken(code := error_code_in(body)):
            assert code is not None
            if code == POLICY_NOT_FOUND and call.policy is not None:
                engine.lacks.add(call.policy)
            return self._untaken(engine, Refusal(code, status, headers, body))
        if response.is_success:
            self._note_session(engine, session_id_in(body), call)
        self._metrics.count_response(engine, status)
        await _send_whole(status, headers, body, send)
        return None

    async def _stream(
        self, engine: EngineLink, response: httpx.Response, headers: Headers, send: Send
    ) -> None:
        """Each part as it comes. A reply that breaks ends with an error event, or a broken connection."""
        await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        is_event_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        tail = _EVENT_END
        try:
            async for part in _parts(response):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                tail = (tail + part)[-len(_EVENT_END) :]
        except httpx.TransportError as error:
            lost = self._lost_reply(engine, error)
            if is_event_stream and tail == _EVENT_END:
                await send({"type": "http.response.body", "body": event(error_body(lost))})
            return  # a reply without its end closes the connection
        await send({"type": "http.response.body"})

    def _note_session(self, engine: EngineLink, session_id: str | None, call: Call) -> None:
        if session_id is None:
            return
        if call.method == "DELETE":
            self._fleet.forget(session_id)
        elif (before := self._fleet.learn(session_id, engine)) is not None:
            self._metrics.count_moved()
            logger.info("session %s went from %s to %s", session_id, before.name, engine.name)

    def _untaken(self, engine: EngineLink, refusal: Refusal) -> Refusal:
        self._metrics.count_untaken(engine, refusal.code)
        if refusal.code == DRAINING:
            mark(engine, EngineState.DRAINING, "")
        return refusal

    def _lost(self, engine: EngineLink, call: Call, error: httpx.TransportError) -> Refusal:
        """A refusal if the call may be sent again; otherwise raises LostReplyError."""
        lost = self._lost_reply(engine, error)
        if not call.can_repeat:
            raise lost from error
        return self._untaken(engine, Refusal("unreachable"))

    def _lost_reply(self, engine: EngineLink, error: httpx.TransportError) -> LostReplyError:
        mark(engine, EngineState.UNREACHABLE, describe(error))
        self._metrics.count_lost(engine)
        return LostReplyError(
            f"the connection to engine {engine.name} broke before the reply's end; whether the call was "
            f"taken is not known ({describe(error)})"
        )

    async def _refuse(self, refusals: list[Refusal], send: Send) -> None:
        """Nobody took the call: pass on the refusal that says most."""
        for code in (LOCKED, NOT_FOUND, OVERLOADED, POLICY_NOT_FOUND):
            for refusal in refusals:
                if refusal.code == code:
                    await _send_whole(refusal.status, refusal.headers or [], refusal.body, send)
                    return
        raise NoEngineReadyError(self._fleet)


def _parts(response: httpx.Response) -> AsyncIterable[bytes]:
    """The body as it comes, not decoded."""
    return cast(httpx.AsyncByteStream, response.stream)


async def _send_whole(status: int, headers: Headers, body: bytes, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
