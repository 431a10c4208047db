"""A page without a browser: speaks the websocket as the front end does."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect


@dataclass(frozen=True, slots=True)
class Picture:
    camera: int
    robot: int
    seek: int
    t: float
    jpeg: bytes


@dataclass
class Answer:
    """What came back for a wish."""

    shown: dict[str, Any] = field(default_factory=dict)
    pictures: list[Picture] = field(default_factory=list)
    changes: list[dict[str, Any]] = field(default_factory=list)


class SocketClient:
    def __init__(self, address: str, **options: Any) -> None:
        host = urlsplit(address).netloc
        options = {"origin": f"http://{host}", "max_size": None} | options
        self._stack = contextlib.ExitStack()
        self.socket: ClientConnection = self._stack.enter_context(connect(f"ws://{host}/socket", **options))
        self._ids = itertools.count(1)
        self._seeks = itertools.count(1)

    def send(self, **message: Any) -> None:
        self.socket.send(json.dumps(message))

    def receive(self) -> Picture | dict[str, Any]:
        data = self.socket.recv(timeout=60)
        if isinstance(data, str):
            return json.loads(data)
        kind, camera, robot, seek, t = struct.unpack("<BBHId", data[:16])
        assert kind == 1
        return Picture(camera, robot, seek, t, data[16:])

    def reply(self, type: str, **fields: Any) -> dict[str, Any]:
        """The whole reply to a question, refusals too."""
        number = next(self._ids)
        self.send(type=type, id=number, **fields)
        while True:
            message = self.receive()
            if isinstance(message, dict) and message["type"] == "reply" and message["id"] == number:
                return message

    def ask(self, type: str, **fields: Any) -> Any:
        reply = self.reply(type, **fields)
        assert reply["error"] is None, reply["error"]
        return reply["body"]

    def wish(self, t: float | None, **fields: Any) -> Answer:
        seek = next(self._seeks)
        self.send(type="wish", seek=seek, t=t, **fields)
        answer = Answer()
        while True:
            match self.receive():
                case Picture() as picture:
                    answer.pictures.append(picture)
                case {"type": "changes"} as changes:
                    answer.changes.append(changes)
                case {"type": "shown", "seek": found} as shown if found == seek:
                    answer.shown = shown
                    return answer

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> SocketClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
