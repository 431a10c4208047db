"""A lean HTTP/1.1 connection for the benchmarks: what arrives is kept with its time, and read afterwards.

A client with pools, retries and models of its own takes milliseconds of each reply, and shares the
interpreter with a hundred others that are measured at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from dayshift.types import DayshiftError


@dataclass(slots=True)
class Response:
    """A response as it comes: each part of its body, and when (`time.perf_counter`) it was there."""

    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(part for _, part in self.parts).decode(errors="replace")


class HttpConnection(asyncio.Protocol):
    """One connection, one request at a time. `open` makes it; close it.

    Raises DayshiftError where the server cannot be reached, ends the connection, or speaks no HTTP.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        parts = urlsplit(url)
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._base_path = parts.path
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._response = Response()
        self._whole: asyncio.Future[None] | None = None
        self._on_part: Callable[[bytes], object] = len
        self._is_lost = asyncio.Event()
        self._now = 0.0

    @classmethod
    async def open(cls, url: str, headers: Mapping[str, str]) -> HttpConnection:
        """Connect to the server at `url`, which sends every request with `headers`."""
        parts = urlsplit(url)
        is_https = parts.scheme == "https"
        port = parts.port or (443 if is_https else 80)
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: cls(url, headers), parts.hostname or "", port, ssl=is_https or None
            )
        except OSError as error:
            raise DayshiftError(f"{url}: {error.strerror or error}") from error
        return connection

    async def request(
        self, method: str, path: str, content: bytes = b"", on_part: Callable[[bytes], object] = len
    ) -> Response:
        """Send a request at once and return its whole response. `on_part` gets each part of the body."""
        assert self._transport is not None, "made by open"
        self._response, self._on_part = Response(), on_part
        self._whole = asyncio.get_running_loop().create_future()
        head = f"{method} {self._base_path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(content)}"
        self._transport.write(f"{head}\r\n\r\n".encode() + content)
        await self._whole
        return self._response

    async def aclose(self) -> None:
        """Close the connection, and return when it is closed."""
        if self._transport is not None:
            self._transport.close()
            await self._is_lost.wait()

    # --- called by the event loop ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(DayshiftError(f"{self._url} does not answer in HTTP ({error})"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost.set()
        self._end(DayshiftError(f"{self._url}: the connection ended before the reply did"))

    def _end(self, error: DayshiftError) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(error)

    # --- called by the parser ----------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._response.parts.append((self._now, body))
        self._on_part(body)

    def on_message_complete(self) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)
