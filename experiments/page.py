"""The live page beside a run: in a process of its own, which ends with the run's."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from dayshift.experiments.launcher import ProcessLauncher
from dayshift.processes import start_without_ctrl_c
from dayshift.types import DayshiftError

_CLOSE_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class _Ready:
    address: str


@dataclass(frozen=True, slots=True)
class _Refused:
    reason: str


class PageProcess:
    """The page for a folder of runs. Use as a context manager: no process is left behind."""

    def __init__(self, runs_dir: Path, *, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        # Not a daemon: it renders in a process of its own.
        self._process = context.Process(target=_serve, args=(far_end, runs_dir, port), name="page")
        start_without_ctrl_c(self._process)
        far_end.close()
        try:
            answer: _Ready | _Refused = self._connection.recv()
        except EOFError:
            self._process.join()
            answer = _Refused(f"its process ended (exit code {self._process.exitcode})")
        if isinstance(answer, _Refused):
            self.close()
            raise DayshiftError(f"--ui: the page cannot start: {answer.reason}")
        self.address = answer.address

    def close(self) -> None:
        """End the page."""
        self._connection.close()
        self._process.join(_CLOSE_PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection, runs_dir: Path, port: int) -> None:
    """Main function of the page's process."""
    logging.basicConfig(level=logging.WARNING)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    from dayshift.webui.app import PageOptions
    from dayshift.webui.server import serve

    options = PageOptions(runs_dir=runs_dir, launcher=ProcessLauncher(runs_dir), port=port)
    try:
        serve(options, on_ready=lambda address: connection.send(_Ready(address)))
    except DayshiftError as error:
        connection.send(_Refused(str(error)))


def _end_with_parent(connection: Connection) -> None:
    """Ends this process in order when the run has closed its end of the pipe, or has ended."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
