"""The page's side of the live feed: what a run tells while it goes on.

Reconnects by itself, so a page may be opened before the run and stay open after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dayshift.sim.types import Camera
from dayshift.webui import wire
from dayshift.webui.pictures import Picture, encode_jpeg

_RECONNECT_S = 1.0
_LOOK_PATIENCE_S = 2.0
_MAX_KEPT_BYTES = 64 << 20  # of pictures of attempts that are not yet in the files


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePictures:
    """A robot's pictures as they came."""

    robot: str
    attempt_id: str
    index: int
    t: float
    pictures: tuple[Picture, ...]

    @property
    def num_bytes(self) -> int:
        return sum(len(picture.jpeg) for picture in self.pictures)


class LiveRun:
    """A connection to a run that may be going on. `on_news` is called in the loop's thread."""

    def __init__(self, run_dir: Path, on_news: Callable[[], None]) -> None:
        self._run_dir = run_dir
        self._on_news = on_news
        self._kept: deque[LivePictures] = deque()
        self._num_kept_bytes = 0
        self._newest: dict[str, LivePictures] = {}
        self._clock_offset_s = 0.0
        self.hello: wire.Hello | None = None  # None while the run is not going on
        self._has_looked = asyncio.Event()
        self.running: dict[str, dict[str, Any]] = {}  # robot -> the attempt it is at, as `Attempt` fields
        self._task = asyncio.create_task(self._follow())

    @property
    def is_live(self) -> bool:
        return self.hello is not None

    async def look(self) -> None:
        """Return when it is known whether the run goes on."""
        with contextlib.suppress(TimeoutError):  # it hangs: then it does not go on
            await asyncio.wait_for(self._has_looked.wait(), _LOOK_PATIENCE_S)

    def now(self) -> float:
        """Seconds on the run clock, while the run goes on."""
        return time.monotonic() + self._clock_offset_s

    def newest(self, robot: str) -> LivePictures | None:
        """The newest pictures of a robot."""
        return self._newest.get(robot)

    def at(self, robot: str, t: float) -> LivePictures | None:
        """The pictures of a robot that were the newest at `t`; None when they are not kept any more."""
        for kept in reversed(self._kept):
            if kept.robot == robot and kept.t <= t:
                return kept
        return None

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _follow(self) -> None:
        while True:
            try:
                reader, writer = await _connect(self._run_dir)
            except OSError:  # nobody listens: the run is over, or has not begun
                self._has_looked.set()
                await asyncio.sleep(_RECONNECT_S)
                continue
            try:
                while True:
                    length = int.from_bytes(await reader.readexactly(wire.LENGTH_BYTES), "big")
                    await self._take(wire.decode(await reader.readexactly(length)))
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()
                self.hello = None
                self.running.clear()
                self._newest.clear()
                self._on_news()

    async def _take(self, message: wire.FromRun) -> None:
        match message:
            case wire.Hello():
                self.hello = message
                self._has_looked.set()
                self._clock_offset_s = message.t - time.monotonic()
            case wire.Told(kind="attempt_started"):
                self.running[message.robot] = {**message.body["attempt"], "start_s": message.t}
            case wire.Told(kind="attempt_ended"):
                self.running.pop(message.robot, None)
            case wire.Pictures():
                self._keep(await asyncio.to_thread(_encode, message))
        self._on_news()

    def _keep(self, pictures: LivePictures) -> None:
        self._newest[pictures.robot] = pictures
        self._kept.append(pictures)
        self._num_kept_bytes += pictures.num_bytes
        while self._num_kept_bytes > _MAX_KEPT_BYTES:
            self._num_kept_bytes -= self._kept.popleft().num_bytes


async def _connect(run_dir: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Raises OSError when nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with wire.socket_address(run_dir) as address:
            connection.connect(address)
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


def _encode(message: wire.Pictures) -> LivePictures:
    return LivePictures(
        robot=message.robot,
        attempt_id=message.attempt_id,
        index=message.index,
        t=message.t,
        pictures=tuple(
            _encode_one(camera, message.index, *image) for camera, image in sorted(message.images.items())
        ),
    )


def _encode_one(camera: Camera, index: int, height: int, width: int, pixels: bytes) -> Picture:
    image = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
    return Picture(camera=camera, index=index, jpeg=encode_jpeg(image))
