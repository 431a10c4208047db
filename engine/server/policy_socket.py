"""What the websockets of policies share: the policy, the messages, and observations in other words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from fastapi import WebSocket

from dayshift.engine.action_api import ActionChunk, ActionRequest, CameraImage, PolicyInfo
from dayshift.engine.api import InvalidRequestError
from dayshift.engine.async_engine import AsyncEngine

POLICY_VIOLATION = 1008  # close code, in RFC 6455's sense of the word


def engine_of(socket: WebSocket) -> AsyncEngine:
    """The engine behind the socket's app."""
    return socket.app.state.server.engine


async def accept(socket: WebSocket, name: str) -> PolicyInfo | None:
    """Open the socket for the policy `name`; None, and the socket closed, if there is none."""
    await socket.accept()
    policies = engine_of(socket).info.policies
    info = next((info for info in policies if info.name == name), None)
    if info is None:
        served = ", ".join(info.name for info in policies) or "none"
        await socket.close(POLICY_VIOLATION, f"policy {name!r} is not served here; served: {served}")
    return info


async def messages(socket: WebSocket) -> AsyncIterator[bytes]:
    """The client's messages until it goes; a text as its UTF-8 bytes."""
    while (message := await socket.receive())["type"] == "websocket.receive":
        data = message.get("bytes")
        yield message["text"].encode() if data is None else data


def to_request(info: PolicyInfo, images: Mapping[str, Any], state: Any, instruction: Any) -> ActionRequest:
    """An observation in the engine's words. Raises InvalidRequestError."""
    if not isinstance(instruction, str):
        raise InvalidRequestError(f"the instruction is {type(instruction).__name__}; wanted is a text")
    numbers = np.asarray(state)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise InvalidRequestError(
            f"state is {numbers.dtype} {numbers.shape}; wanted are {info.state_dim} numbers"
        )
    return ActionRequest(
        policy=info.name,
        images={name: _to_image(name, image) for name, image in images.items()},
        state=tuple(numbers.tolist()),
        instruction=instruction,
    )


def to_array(chunk: ActionChunk) -> np.ndarray:
    """A chunk's actions, float32 (num_actions, action_dim)."""
    return np.array(chunk.actions, dtype=np.float32)


def _to_image(name: str, image: Any) -> CameraImage:
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        found = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise InvalidRequestError(f"image {name!r} is {found}; wanted is uint8 (height, width, 3)")
    return CameraImage(
        height=image.shape[0], width=image.shape[1], data=np.ascontiguousarray(image).tobytes()
    )
