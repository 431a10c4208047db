"""A client's call: what it is about, and how it is sent on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httpx
import msgspec
from starlette.requests import Request

from dayshift.engine.action_api import PolicyNotFoundError
from dayshift.engine.api import (
    EngineDrainingError,
    EngineOverloadedError,
    InvalidRequestError,
    SessionLockedError,
    SessionNotFoundError,
)
from dayshift.engine.wire import error_code

Headers = list[tuple[bytes, bytes]]

LOCKED = error_code(SessionLockedError(""))
NOT_FOUND = error_code(SessionNotFoundError())
DRAINING = error_code(EngineDrainingError())
OVERLOADED = error_code(EngineOverloadedError())
POLICY_NOT_FOUND = error_code(PolicyNotFoundError())

# What concerns one connection only (RFC 9110, 7.6.1), and what each hop writes itself.
_OF_ONE_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade expect".split()
)
_REQUEST_OWN = _OF_ONE_HOP | {b"host", b"content-length"}
_RESPONSE_OWN = _OF_ONE_HOP | {b"date"}

_SESSION_PATH = re.compile(r"/v1/sessions/(?P<session_id>[^/]+)(?P<action>/.*)?")
_POLICY_PATH = re.compile(r"/v1/policies/(?P<policy>[^/]+)/.*")
_CONNECT_TIMEOUT_S = 2.0
# A turn takes as long as it takes: a dead engine ends the connection, a dead machine is found by
# TCP's keep-alive.
CALL_TIMEOUTS = {"connect": _CONNECT_TIMEOUT_S, "read": None, "write": None, "pool": None}


class CallKind(Enum):
    """What decides where a call goes."""

    STATELESS = auto()
    NEW_SESSION = auto()
    SESSION = auto()
    POLICY = auto()


# Refusals that an engine gives before it has taken a call: another one may be asked.
_NOT_TAKEN = {
    CallKind.STATELESS: frozenset({DRAINING, OVERLOADED}),
    CallKind.NEW_SESSION: frozenset({DRAINING, OVERLOADED}),
    CallKind.SESSION: frozenset({DRAINING, LOCKED, NOT_FOUND}),
    CallKind.POLICY: frozenset({DRAINING, OVERLOADED, POLICY_NOT_FOUND}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One HTTP request, read to its end, so that it can be sent more than once."""

    kind: CallKind
    method: str
    target: bytes  # path and query, as sent
    headers: Headers
    body: bytes
    session_id: str | None = None
    is_fork: bool = False
    policy: str | None = None

    @property
    def can_repeat(self) -> bool:
        """It changes nothing, so that it may be sent again although an engine may have got it."""
        return self.method in ("GET", "HEAD")

    def is_untaken(self, code: str | None) -> bool:
        """An engine that answered with this error code has not taken the call."""
        return code in _NOT_TAKEN[self.kind]

    @property
    def creates_session(self) -> bool:
        """Its reply names a new session."""
        return self.is_fork or self.kind is CallKind.NEW_SESSION

    def request_to(self, engine_url: httpx.URL) -> httpx.Request:
        """The request as the engine gets it: the client's own, but for what each hop writes itself."""
        return httpx.Request(
            self.method,
            engine_url.copy_with(raw_path=self.target),
            headers=self.headers,
            content=self.body,
            extensions={"timeout": CALL_TIMEOUTS},
        )


async def read_call(request: Request) -> Call:
    """Read a request to its end. Raises InvalidRequestError for what a router does not pass on."""
    scope = request.scope
    path, query = scope["path"], scope["query_string"]
    if path == "/v1/drain":
        raise InvalidRequestError("an engine is drained at its own address, not through the router")
    body = await request.body()
    common: dict[str, Any] = {
        "method": request.method,
        "target": scope["raw_path"] + (b"?" + query if query else b""),
        "headers": [(name, value) for name, value in scope["headers"] if name not in _REQUEST_OWN],
        "body": body,
    }
    if match := _SESSION_PATH.fullmatch(path):
        return Call(
            kind=CallKind.SESSION,
            session_id=match["session_id"],
            is_fork=match["action"] == "/fork",
            **common,
        )
    if match := _POLICY_PATH.fullmatch(path):
        return Call(kind=CallKind.POLICY, policy=match["policy"], **common)
    if path == "/v1/sessions":
        return Call(kind=CallKind.NEW_SESSION, session_id=session_id_in(body), **common)
    return Call(kind=CallKind.STATELESS, **common)


def response_headers(response: httpx.Response) -> Headers:
    """An engine's headers as the client gets them."""
    return [(name, value) for name, value in response.headers.raw if name.lower() not in _RESPONSE_OWN]


def session_id_in(body: bytes) -> str | None:
    """`session_id` of a JSON object; None if there is none, or the body is something else."""
    fields = _json_object(body)
    session_id = fields.get("session_id")
    return session_id if isinstance(session_id, str) else None


def error_code_in(body: bytes) -> str | None:
    """The code of an engine's error body; None if it is not one."""
    error = _json_object(body).get("error")
    return error.get("code") if isinstance(error, dict) else None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(body)
    except msgspec.DecodeError:  # the engine says what is wrong with it
        return {}
    return fields if isinstance(fields, dict) else {}
