"""What stands before every route: API key, host name, and the size of the body."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections import Counter
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.server.errors import error_response
from dayshift.engine.server.limits import NO_LIMITS, Limits
from dayshift.engine.server.metrics import Metrics
from dayshift.engine.wire import TooManyRequestsError, UnauthorizedError

OPEN_PATHS = frozenset({"/health"})
# A refused body is read to its end up to this many times the limit, so that the client sees the
# answer instead of a broken connection.
_DRAIN_FACTOR = 8


class Gate:
    """ASGI middleware. Without an API key only requests to a loopback name are let in.

    The latter keeps web pages that rebind their own host name to 127.0.0.1 away from the sessions.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Collection[str],
        max_body_bytes: int,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self._app = app
        self._api_keys = tuple(api_keys)
        self._max_body_bytes = max_body_bytes
        self._limits = limits
        self._num_running: Counter[str] = Counter()  # by API key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["type"] == "websocket":
            if self._refusal(headers) is None and _is_from_this_machine(headers.get("origin")):
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
            return
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif (refusal := self._refusal(headers)) is not None:
            await error_response(refusal)(scope, receive, send)
        elif scope["method"] == "POST":
            await self._counted(self._key(headers) or "", scope, receive, send)
        else:
            await self._app(scope, self._limited(receive), send)

    async def _counted(self, key: str, scope: Scope, receive: Receive, send: Send) -> None:
        """One more call of this key, if it may have one more."""
        most = self._limits.max_requests_per_key
        if most is not None and self._num_running[key] >= most:
            refusal = TooManyRequestsError(f"this API key has {most} calls under way, as many as it may have")
            await error_response(refusal)(scope, receive, send)
            return
        self._num_running[key] += 1
        try:
            await self._app(scope, self._limited(receive), send)
        finally:
            self._num_running[key] -= 1

    def _refusal(self, headers: Headers) -> EngineError | None:
        if self._api_keys:
            if self._key(headers) is not None:
                return None
            return UnauthorizedError("the API key is missing or wrong (header: Authorization: Bearer KEY)")
        if is_loopback(_host_name(headers.get("host", ""))):
            return None
        return InvalidRequestError("a server without API key answers to loopback host names only")

    def _key(self, headers: Headers) -> str | None:
        """The API key that a request came with, if it is one of ours. All are compared, every time."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() not in ("bearer", "api-key"):  # of OpenAI's clients, and of openpi's
            return None
        found = None
        for key in self._api_keys:
            if hmac.compare_digest(given.encode("latin-1"), key.encode()):  # the bytes as sent
                found = key
        return found

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0
        is_whole = False

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            message = await (receive() if is_whole else self._in_time(receive))
            is_whole = not message.get("more_body", False)
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                if message.get("more_body", False):
                    await self._drain(receive)
                raise HTTPException(413, f"the request body is larger than {self._max_body_bytes} bytes")
            return message

        return limited

    async def _in_time(self, receive: Receive) -> Message:
        try:
            return await asyncio.wait_for(receive(), self._limits.body_timeout_s)
        except TimeoutError:
            seconds = self._limits.body_timeout_s
            raise HTTPException(408, f"the request body did not arrive within {seconds:g} s") from None

    async def _drain(self, receive: Receive) -> None:
        num_bytes = 0
        while num_bytes < _DRAIN_FACTOR * self._max_body_bytes:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return


class ResponseCounter:
    """ASGI middleware that counts responses by route and status."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = "unknown" if route is None else route.path
                self._metrics.count_response(path, message["status"])
            await send(message)

        await self._app(scope, receive, counting_send)


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_from_this_machine(origin: str | None) -> bool:
    """A browser names the page that opens a websocket, and opens it for pages of any site."""
    return origin is None or is_loopback(urlsplit(origin).hostname or "")


def _host_name(host_header: str) -> str:
    """Without port; `[::1]:8000` is an IPv6 address with one."""
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]
