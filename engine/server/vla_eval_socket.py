"""vla-eval's websocket protocol, which its unmodified harness speaks.

Messages are maps of type, payload, seq and timestamp. hello is answered by hello, an observation by one
action; episode_start and episode_end are not answered, and what is left of a chunk is then discarded.
"""

from __future__ import annotations

import time
from collections import deque
from importlib.metadata import version
from typing import Any

import numpy as np
from fastapi import APIRouter, WebSocket

from dayshift.engine.action_api import ActionRequest, PolicyInfo
from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.array_packing import pack, unpack
from dayshift.engine.server.policy_socket import accept, engine_of, messages, to_array, to_request

router = APIRouter()

_PROTOCOL_VERSION = 1
_CAMERAS: tuple[str, ...] = (
    "agentview",
    "wrist",
)  # vla-eval's names for LIBERO's cameras, in the order of the policy's

# LIBERO's actions and observations in the words that the harness compares with its benchmark's.
_ACTION_SPEC = {
    "position": {"name": "position", "dims": 3, "format": "delta_xyz", "range": [-1, 1]},
    "rotation": {"name": "rotation", "dims": 3, "format": "axis_angle", "range": [-3.15, 3.15]},
    "gripper": {"name": "gripper", "dims": 1, "format": "binary_close_positive", "range": [-1, 1]},
}
_IMAGE_SPEC = {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"}
_STATE_SPEC = {"name": "state", "dims": 8, "format": "eef_pos3_axisangle3_gripper2"}
_LANGUAGE_SPEC = {"name": "language", "dims": 0, "format": "language"}


@router.websocket("/v1/policies/{name}/vla-eval")
async def serve(socket: WebSocket, name: str, n_action_steps: int | None = None) -> None:
    """An action for each observation; `?n_action_steps=` of a chunk are used before the next is computed."""
    info = await accept(socket, name)
    if info is None:
        return
    num_used = min(max(1, n_action_steps or info.n_action_steps), info.chunk_size)
    queue: deque[np.ndarray] = deque()
    async for data in messages(socket):
        seq = 0
        try:
            message = _read(data)
            seq = message["seq"]
            match message["type"]:
                case "hello":
                    answer, payload = "hello", _hello(info)
                case "observation":
                    if not queue:
                        chunk = await engine_of(socket).act(_to_request(info, message["payload"]))
                        queue.extend(to_array(chunk)[:num_used])
                    answer, payload = "action", {"actions": queue.popleft()}
                case "episode_start" | "episode_end":
                    queue.clear()
                    continue
                case kind:
                    raise InvalidRequestError(f"message of unknown type {kind!r}")
        except EngineError as error:
            answer, payload = "error", {"error": str(error)}
        reply = {"type": answer, "payload": payload, "seq": seq, "timestamp": time.time()}
        await socket.send_bytes(pack(reply, text_keys=True))


def _read(data: bytes) -> dict[str, Any]:
    message = unpack(data)
    match message:
        case {"type": str(), "payload": dict(), "seq": int()}:
            return message
        case _:
            raise InvalidRequestError("a message is a map with type, payload (a map) and seq (a number)")


def _hello(info: PolicyInfo) -> dict[str, Any]:
    cameras = dict.fromkeys(_CAMERAS[: len(info.cameras)], _IMAGE_SPEC)
    return {
        "harness_version": version("dayshift"),
        "protocol_version": _PROTOCOL_VERSION,
        "model_server": f"dayshift {info.name} ({info.kind})",
        "capabilities": {},
        "observation_params": {"send_wrist_image": len(info.cameras) > 1, "send_state": True},
        "action_spec": _ACTION_SPEC,
        "observation_spec": {**cameras, "state": _STATE_SPEC, "language": _LANGUAGE_SPEC},
    }


def _to_request(info: PolicyInfo, payload: dict[str, Any]) -> ActionRequest:
    if missing := [name for name in ("images", "states", "task_description") if name not in payload]:
        raise InvalidRequestError(f"the observation has no {' and no '.join(missing)}")
    images = payload["images"]
    if not isinstance(images, dict):
        raise InvalidRequestError("images is no map from cameras to images")
    renamed = dict(zip(_CAMERAS, info.cameras, strict=False))
    return to_request(
        info,
        {renamed.get(name, str(name)): image for name, image in images.items()},
        payload["states"],
        payload["task_description"],
    )
