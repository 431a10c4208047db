"""What stands before every request of the page: key, host name, origin; and the headers behind it."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "dayshift_page"
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
        "form-action 'self'; frame-ancestors 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_ASK_FOR_KEY = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Dayshift</title>
<h1>Dayshift</h1><p>This page asks for a key.</p>
<form action="/"><label>Key <input name="key" type="password" autofocus></label>
<button>Open</button></form></html>"""


class Gate:
    """ASGI middleware. Without a key only requests to a loopback name are let in.

    The latter keeps web pages that rebind their own host name to 127.0.0.1 away. A browser brings the
    key once (`/?key=…`) and keeps a cookie; scripts send it as a bearer token. A socket, and everything
    but GET, must come from the page itself.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._find_refusal(scope, headers)
        if scope["type"] == "websocket":
            if refusal is not None:
                await send({"type": "websocket.close", "code": 1008})
                return
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        await (refusal or self._app)(scope, receive, send_with_headers)

    def _find_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        is_socket = scope["type"] == "websocket"
        if (is_socket or scope["method"] not in ("GET", "HEAD")) and not _is_same_origin(headers, host):
            return PlainTextResponse("requests of other pages are refused", 403)
        if self._api_key is None:
            if not is_loopback(host_name(host)):
                return PlainTextResponse("a page without a key answers to loopback host names only", 403)
            return None
        if self._has_key(headers):
            return None
        if not is_socket:
            query = parse_qs(scope["query_string"].decode("latin-1"))
            if "key" in query:
                return self._log_in(query, scope["path"])
        return HTMLResponse(_ASK_FOR_KEY, 401)

    def _has_key(self, headers: Headers) -> bool:
        assert self._api_key is not None
        bearer = headers.get("authorization", "").encode("latin-1")
        if hmac.compare_digest(bearer, f"Bearer {self._api_key}".encode()):
            return True
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and hmac.compare_digest(
            cookie.value.encode(), _token(self._api_key).encode()
        )

    def _log_in(self, query: dict[str, list[str]], path: str) -> Response:
        assert self._api_key is not None
        if not hmac.compare_digest(query.pop("key")[0].encode(), self._api_key.encode()):
            return HTMLResponse(_ASK_FOR_KEY, 401)
        rest = urlencode(query, doseq=True)
        response = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
        response.set_cookie(COOKIE, _token(self._api_key), httponly=True, samesite="strict")
        return response


def _token(api_key: str) -> str:
    """What the cookie holds: proof of the key, not the key."""
    return hashlib.sha256(b"dayshift page\0" + api_key.encode()).hexdigest()


def _is_same_origin(headers: Headers, host: str) -> bool:
    return bool(host) and urlsplit(headers.get("origin", "")).netloc == host


def host_name(host_header: str) -> str:
    """Without port; `[::1]:8000` is an IPv6 address with one."""
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0]
    return host_header.partition(":")[0]


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
