"""Policy servers as the robot's side calls them: ours over HTTP, or any that speaks openpi's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import websockets.exceptions
import websockets.sync.client
from numpy.typing import NDArray

from dayshift.engine.action_api import ActionBody, CameraImage, RunningChunk
from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.array_packing import pack, unpack
from dayshift.engine.client import DayshiftClient
from dayshift.engine.wire import EngineUnreachableError
from dayshift.policy.remote.chunk_queue import Chunk
from dayshift.sim.types import CAMERAS, Observation
from dayshift.types import DayshiftError


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """What a chunk is asked for with, beside the observation."""

    deadline_s: float | None = None  # from now
    seed: int | None = None
    left: Chunk | None = None  # the running chunk's actions from the observation on
    num_frozen: int = 0  # of these, how many will be executed before the answer is there


class Connection(Protocol):
    """A policy behind a server."""

    n_action_steps: int | None
    """What the policy was meant to use of a chunk, if the server says."""
    chunk_size: int | None
    """Actions in a chunk, if the server says."""
    has_guidance: bool
    """Whether `ChunkRequest.left` has an effect."""

    def act(self, observation: Observation, request: ChunkRequest) -> Chunk:
        """float32 (num_actions, action_dim). Raises EngineError; the next call connects again."""
        ...

    def close(self) -> None: ...


def connect(url: str, *, timeout_s: float) -> Connection:
    """A connection for `http://…[/v1/policies/NAME]` (ours) or `ws://…` (openpi's protocol).

    Raises DayshiftError for another kind of address, EngineError when nobody answers.
    """
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.netloc:
        name = parts.path.removeprefix("/v1/policies/").strip("/") or None
        return DayshiftConnection(f"{parts.scheme}://{parts.netloc}", name, timeout_s=timeout_s)
    if parts.scheme in ("ws", "wss") and parts.netloc:
        return OpenpiConnection(url, timeout_s=timeout_s)
    raise DayshiftError(
        f"policy server {url!r}; allowed: http://HOST:PORT, http://HOST:PORT/v1/policies/NAME, ws://HOST:PORT"
    )


class DayshiftConnection:
    """A policy of our own server; its cameras get LIBERO's in the order agentview, wrist."""

    has_guidance = True

    def __init__(self, url: str, name: str | None, *, timeout_s: float) -> None:
        self._client = DayshiftClient(url, timeout_s=timeout_s)
        served = {info.name: info for info in self._client.policies()}
        if name is None and len(served) == 1:
            name = next(iter(served))
        if name not in served:
            asked = "which policy is meant is not said" if name is None else f"there is no policy {name!r}"
            raise DayshiftError(f"{url}: {asked}; served: {', '.join(served) or 'none'}")
        self._info = served[name]
        self.n_action_steps: int | None = self._info.n_action_steps
        self.chunk_size: int | None = self._info.chunk_size

    def act(self, observation: Observation, request: ChunkRequest) -> Chunk:
        running = None
        if request.left is not None:
            running = RunningChunk(
                actions=tuple(map(tuple, request.left.tolist())),
                num_frozen=request.num_frozen,
                num_guided=len(request.left),
            )
        body = ActionBody(
            images={
                name: _to_image(observation.images[camera])
                for name, camera in zip(self._info.cameras, CAMERAS, strict=False)
            },
            state=tuple(observation.state.tolist()),
            instruction=observation.instruction,
            deadline_ms=None if request.deadline_s is None else 1000 * request.deadline_s,
            seed=request.seed,
            running=running,
        )
        return np.array(self._client.act(self._info.name, body).actions, dtype=np.float32)

    def close(self) -> None:
        self._client.close()


class OpenpiConnection:
    """A server that speaks openpi's websocket protocol, with openpi's names for LIBERO's observations."""

    n_action_steps: int | None = None
    chunk_size: int | None = None
    has_guidance = False

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._open = ExitStack()
        self._socket: websockets.sync.client.ClientConnection | None = None
        self._connected()

    def act(self, observation: Observation, request: ChunkRequest) -> Chunk:
        message = {
            "observation/image": observation.images["agentview"],
            "observation/wrist_image": observation.images["wrist"],
            "observation/state": observation.state,
            "prompt": observation.instruction,
        }
        socket = self._connected()
        try:
            socket.send(pack(message, text_keys=False))
            reply = socket.recv(self._timeout_s)
        except (OSError, TimeoutError, websockets.exceptions.WebSocketException) as error:
            self.close()
            raise EngineUnreachableError(f"{self._url}: {type(error).__name__} {error}") from error
        if isinstance(reply, str):
            raise InvalidRequestError(f"{self._url}: {(reply.strip().splitlines() or ['error'])[-1]}")
        return _to_chunk(self._url, unpack(reply))

    def close(self) -> None:
        self._socket = None
        with suppress(OSError, websockets.exceptions.WebSocketException):
            self._open.close()

    def _connected(self) -> websockets.sync.client.ClientConnection:
        if self._socket is None:
            try:
                connecting = websockets.sync.client.connect(
                    self._url, compression=None, max_size=None, open_timeout=self._timeout_s, proxy=None
                )
                socket = self._open.enter_context(connecting)
                unpack(_bytes(socket.recv(self._timeout_s)))  # the server's metadata
            except (OSError, TimeoutError, websockets.exceptions.WebSocketException) as error:
                self.close()
                raise EngineUnreachableError(
                    f"no policy server answers at {self._url} ({type(error).__name__})"
                ) from error
            self._socket = socket
        return self._socket


def _to_image(image: NDArray[np.uint8]) -> CameraImage:
    return CameraImage(height=image.shape[0], width=image.shape[1], data=image.tobytes())


def _to_chunk(url: str, reply: Any) -> Chunk:
    actions = reply.get("actions") if isinstance(reply, Mapping) else None
    if not isinstance(actions, np.ndarray) or actions.ndim != 2 or not len(actions):
        raise EngineError(f"{url}: the reply holds no actions of two dimensions")
    return actions.astype(np.float32)


def _bytes(message: str | bytes) -> bytes:
    return message.encode() if isinstance(message, str) else message
