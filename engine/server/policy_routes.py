"""Policies over HTTP: observations in, action chunks out."""

from __future__ import annotations

import time

import msgspec
from fastapi import APIRouter, Request, Response

from dayshift.engine.action_api import ActionBody, ActionRequest
from dayshift.engine.api import InvalidRequestError
from dayshift.engine.server.state import State

JSON = "application/json"
MSGPACK = "application/msgpack"

router = APIRouter(prefix="/v1/policies")

_decoders = {
    JSON: msgspec.json.Decoder(ActionBody),
    MSGPACK: msgspec.msgpack.Decoder(ActionBody),
}
_encoders = {JSON: msgspec.json.Encoder(), MSGPACK: msgspec.msgpack.Encoder()}


@router.get("")
async def list_policies(state: State) -> Response:
    """The served policies."""
    return Response(_encoders[JSON].encode({"policies": state.engine.info.policies}), media_type=JSON)


@router.post("/{name}/actions")
async def act(name: str, request: Request, state: State) -> Response:
    """Compute an action chunk. The reply has the request's media type."""
    received_at = time.monotonic()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in _decoders:
        raise InvalidRequestError(f"content-type {media_type!r} is not supported; use {JSON} or {MSGPACK}")
    try:
        body = _decoders[media_type].decode(await request.body())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no action request: {error}") from error
    chunk = await state.engine.act(_to_request(name, body, received_at))
    return Response(_encoders[media_type].encode(chunk), media_type=media_type)


def _to_request(policy: str, body: ActionBody, received_at: float) -> ActionRequest:
    return ActionRequest(
        policy=policy,
        images=body.images,
        state=body.state,
        instruction=body.instruction,
        deadline=None if body.deadline_ms is None else received_at + body.deadline_ms / 1000,
        seed=body.seed,
        running=body.running,
    )
