"""Serve the page: until a signal, or in the background of a program."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import uvicorn

from dayshift.processes import when_asked_to_end
from dayshift.types import DayshiftError
from dayshift.webui.app import PageOptions, create_app
from dayshift.webui.gate import is_loopback

_GRACE_S = 2
_MAX_MESSAGE_BYTES = 1 << 20


def serve(options: PageOptions, *, on_ready: Callable[[str], None] = lambda _: None) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP. `on_ready` is given the page's address.

    Raises DayshiftError when the address cannot be used.
    """
    server = _make_server(options)
    with _listen(options) as listener, when_asked_to_end(server.end):
        on_ready(address(listener, options))
        server.run(sockets=[listener])


@contextmanager
def running_page(options: PageOptions) -> Iterator[str]:
    """The page in a background thread while the context lasts; yields its address."""
    with _listen(options) as listener:
        server = _make_server(options)
        thread = threading.Thread(target=server.run, args=([listener],), name="page", daemon=True)
        thread.start()
        try:
            yield address(listener, options)
        finally:
            server.end()
            thread.join()


class _Server(uvicorn.Server):
    """Its signals are `serve`'s: uvicorn would raise them again when everything is closed."""

    def end(self) -> None:
        self.should_exit = True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def address(listener: socket.socket, options: PageOptions) -> str:
    """What to open in a browser."""
    host: str = listener.getsockname()[0]
    port: int = listener.getsockname()[1]
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    base = f"http://[{name}]:{port}/" if ":" in name else f"http://{name}:{port}/"
    page = base + options.path
    return f"{page}?key={options.api_key}" if options.api_key else page


def _listen(options: PageOptions) -> socket.socket:
    host, port = options.host, options.port
    if options.api_key is None and not is_loopback(host):
        raise DayshiftError(
            f"listening on {host} needs a key; without one only loopback addresses "
            "(127.0.0.1, ::1, localhost) are allowed"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise DayshiftError(f"address {host}, port {port} {reason}; give another port") from error


def _make_server(options: PageOptions) -> _Server:
    return _Server(
        uvicorn.Config(
            create_app(options),
            log_config=None,
            access_log=False,
            server_header=False,
            ws="websockets-sansio",
            ws_max_size=_MAX_MESSAGE_BYTES,
            ws_per_message_deflate=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
