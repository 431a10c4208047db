"""openpi's websocket protocol, which the unmodified `openpi-client` speaks.

The server sends metadata, then one chunk for each observation. An error is a text message, after which the
connection goes on. Observations are flat maps: `observation/image`, `observation/wrist_image` (or any camera
of the policy), `observation/state`, `prompt`.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, WebSocket

from dayshift.engine.action_api import ActionRequest, PolicyInfo
from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.array_packing import pack, unpack
from dayshift.engine.server.policy_socket import (
    POLICY_VIOLATION,
    accept,
    engine_of,
    messages,
    to_array,
    to_request,
)

router = APIRouter()

_PREFIX = "observation/"
_CAMERAS: tuple[str, ...] = (
    "image",
    "wrist_image",
)  # openpi's names for LIBERO's, in the order of the policy's


@router.websocket("/")
async def serve_only_policy(socket: WebSocket) -> None:
    """Where openpi's client looks by itself; for a server with one policy."""
    policies = engine_of(socket).info.policies
    if len(policies) == 1:
        await serve(socket, policies[0].name)
    else:
        await socket.accept()
        reason = f"{len(policies)} policies are served here; connect to /v1/policies/NAME/openpi"
        await socket.close(POLICY_VIOLATION, reason)


@router.websocket("/v1/policies/{name}/openpi")
async def serve(socket: WebSocket, name: str) -> None:
    """A chunk for each observation, until the client goes."""
    info = await accept(socket, name)
    if info is None:
        return
    await socket.send_bytes(pack(msgspec.to_builtins(info), text_keys=False))
    async for message in messages(socket):
        started_at = time.monotonic()
        try:
            chunk = await engine_of(socket).act(_to_request(info, unpack(message)))
        except EngineError as error:
            await socket.send_text(str(error))
            continue
        timing = {
            "infer_ms": chunk.infer_ms,
            "queued_ms": chunk.queued_ms,
            "total_ms": 1000 * (time.monotonic() - started_at),
        }
        await socket.send_bytes(pack({"actions": to_array(chunk), "server_timing": timing}, text_keys=False))


def _to_request(info: PolicyInfo, observation: Any) -> ActionRequest:
    if not isinstance(observation, dict):
        raise InvalidRequestError("an observation is a map from names to arrays")
    values = {str(name).removeprefix(_PREFIX): value for name, value in observation.items()}
    if missing := [name for name in ("prompt", "state") if name not in values]:
        raise InvalidRequestError(f"the observation has no {' and no '.join(missing)}")
    prompt, state = values.pop("prompt"), values.pop("state")
    renamed = dict(zip(_CAMERAS, info.cameras, strict=False))
    return to_request(info, {renamed.get(name, name): image for name, image in values.items()}, state, prompt)
