"""The run's side of the live feed: a subscriber that never makes a loop wait.

    loops: publish(event) → one short lock → per page: a bounded queue and the newest picture per robot
    per page a thread: sends, however slowly that page reads

Without a page connected an event costs the lock and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from dayshift.types import Event
from dayshift.webui import wire
from dayshift.webui.events import FrameRendered

MAX_QUEUED_EVENTS = 4096  # a page that lags further reads the rest from the database
_GOODBYE_S = 1.0
logger = logging.getLogger(__name__)


class LivePublisher:
    """Tells every connected page what happens in a run. Subscribe it; use as a context manager.

    `now` gives seconds on the run clock. A folder that cannot hold a socket only costs the live view.
    """

    def __init__(self, run_dir: Path, *, now: Callable[[], float], engine_url: str | None) -> None:
        self._run_dir = run_dir
        self._now = now
        self._engine_url = engine_url
        self._lock = threading.Lock()
        self._pages: list[_Page] = []
        self._at_work: dict[str, Event] = {}  # robot -> how it began what it is at; new pages hear it first
        self._listener: socket.socket | None = None

    def __call__(self, event: Event, /) -> None:
        with self._lock:
            if event.kind == "attempt_started":
                self._at_work[event.robot] = event
            elif event.kind == "attempt_ended":
                self._at_work.pop(event.robot, None)
            for page in self._pages:
                page.tell(event)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed: the run is over
                return
            page = _Page(connection, self._hello())
            with self._lock:
                self._pages = [page for page in self._pages if page.is_connected]
                self._pages.append(page)
                for event in self._at_work.values():
                    page.tell(event)

    def _hello(self) -> wire.Hello:
        return wire.Hello(t=self._now(), engine_url=self._engine_url, process_id=os.getpid())

    def __enter__(self) -> Self:
        path = self._run_dir / wire.SOCKET
        path.unlink(missing_ok=True)  # of a run that was killed
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with wire.socket_address(self._run_dir) as address:
                listener.bind(address)
            path.chmod(0o600)
            listener.listen()
        except OSError as error:
            listener.close()
            logger.warning("%s: no live view of this run (%s)", self._run_dir, error.strerror)
            return self
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="live-pages", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            self._listener.close()
            (self._run_dir / wire.SOCKET).unlink(missing_ok=True)
        with self._lock:
            pages, self._pages = self._pages, []
        for page in pages:
            page.close()


class _Page:
    """One connected page: what it still has to be told, and the thread that tells it."""

    def __init__(self, connection: socket.socket, hello: wire.Hello) -> None:
        self._connection = connection
        self._changed = threading.Condition()
        self._events: deque[wire.FromRun] = deque([hello], maxlen=MAX_QUEUED_EVENTS)
        self._frames: dict[str, FrameRendered] = {}  # robot -> the newest
        self._is_closing = False
        self.is_connected = True
        self._thread = threading.Thread(target=self._send_all, name="live-page", daemon=True)
        self._thread.start()

    def tell(self, event: Event) -> None:
        with self._changed:
            if isinstance(event, FrameRendered):
                self._frames[event.robot] = event
            else:
                body = msgspec.to_builtins(event)
                told = wire.Told(kind=event.kind, t=event.t, robot=event.robot, body=body)
                self._events.append(told)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_GOODBYE_S)
        self._connection.close()

    def _send_all(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                for message in batch:
                    self._connection.sendall(wire.encode(message))
        except OSError:  # the page has gone
            pass
        self.is_connected = False
        self._connection.close()

    def _next_batch(self) -> list[wire.FromRun] | None:
        with self._changed:
            while not (self._events or self._frames or self._is_closing):
                self._changed.wait()
            if self._is_closing and not self._events:
                return None
            events, frames = list(self._events), list(self._frames.values())
            self._events.clear()
            self._frames.clear()
        return [*events, *(_pictures(frame) for frame in frames)]


def _pictures(frame: FrameRendered) -> wire.Pictures:
    images = {
        camera: (image.shape[0], image.shape[1], np.ascontiguousarray(image).tobytes())
        for camera, image in frame.images.items()
    }
    return wire.Pictures(
        t=frame.t, robot=frame.robot, attempt_id=frame.attempt_id, index=frame.index, images=images
    )
