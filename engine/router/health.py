"""Asks every engine, every second, whether it takes work."""

from __future__ import annotations

import asyncio
import logging

import httpx

from dayshift.engine.router.fleet import EngineLink, EngineState, Fleet

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
_TIMEOUT_S = 2.0
_TIMEOUTS = {"connect": _TIMEOUT_S, "read": _TIMEOUT_S, "write": _TIMEOUT_S, "pool": _TIMEOUT_S}
_NOT_READY = {"draining": EngineState.DRAINING, "dead": EngineState.DEAD}


class HealthChecker:
    """Keeps the state of a fleet's engines."""

    def __init__(self, fleet: Fleet, transport: httpx.AsyncBaseTransport) -> None:
        self._fleet = fleet
        self._transport = transport

    async def check_all(self) -> None:
        """Ask every engine once."""
        await asyncio.gather(*map(self._check, self._fleet.engines))

    async def watch(self) -> None:
        """Ask again and again, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.check_all()

    async def _check(self, engine: EngineLink) -> None:
        request = httpx.Request(
            "GET", engine.url.copy_with(raw_path=b"/health"), extensions={"timeout": _TIMEOUTS}
        )
        try:
            response = await self._transport.handle_async_request(request)
            await response.aread()
        except httpx.RequestError as error:
            mark(engine, EngineState.UNREACHABLE, describe(error))
        else:
            mark(engine, *_state_in(response))


def mark(engine: EngineLink, state: EngineState, reason: str) -> None:
    """Note an engine's state, and log it if it is another than before."""
    if engine.state is not state:
        engine.lacks.clear()  # it may be another program by now
        log = logger.info if state is EngineState.READY else logger.warning
        log("engine %s is %s%s", engine.name, state, f" ({reason})" if reason else "")
    engine.state, engine.reason = state, reason


def describe(error: Exception) -> str:
    """An error in one line; some of httpx's have no text of their own."""
    return " ".join(str(error).split()) or type(error).__name__


def _state_in(response: httpx.Response) -> tuple[EngineState, str]:
    try:
        body = response.json()
    except ValueError:
        body = None
    match body:
        case {"status": "ok"} if response.is_success:
            return EngineState.READY, ""
        case {"status": "draining" | "dead" as status}:
            return _NOT_READY[status], str(body.get("reason", ""))
        case _:
            return EngineState.UNREACHABLE, f"answers {response.status_code}, and not as an engine does"
