"""Starting child processes that a Ctrl-C does not reach. Standard library only; any package may use it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """SIGINT waits while this lasts, in this thread; a child started meanwhile has it blocked for good.

    Ctrl-C reaches every process of the terminal, and one that is still importing would print a traceback.
    A child inherits the signals blocked in the thread that starts it, so no moment of it is uncovered.
    """
    # It has to run by then: starting it, as the first child of multiprocessing does, unblocks the signal.
    resource_tracker.ensure_running()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def start_without_ctrl_c(process: BaseProcess) -> None:
    """Start a process that its parent ends, not Ctrl-C."""
    with ctrl_c_blocked():
        process.start()
