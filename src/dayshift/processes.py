"""Signals that ask to end, and child processes that they don't reach. Standard library only."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line imports this before anything else, and quickly
    from multiprocessing.process import BaseProcess


def asked_to_end() -> tuple[signal.Signals, ...]:
    """The signals by which this process is asked to end: Ctrl-C, SIGTERM, and SIGHUP from a closed terminal.

    Not those that its caller has it ignore: SIGHUP under `nohup`, SIGINT in the background of a script.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return tuple(number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN)


@contextmanager
def when_asked_to_end(end: Callable[[], object]) -> Iterator[None]:
    """While this lasts, these signals call `end`, each time that one comes. For the main thread."""
    found = {number: signal.signal(number, lambda *_: end()) for number in asked_to_end()}
    try:
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """SIGINT and SIGHUP wait while this lasts, in this thread; a child started meanwhile never gets them.

    A terminal sends them to every process, and one that is still importing would print a traceback.
    A child inherits the signals blocked in the thread that starts it, so no moment of it is uncovered.
    """
    from multiprocessing import resource_tracker

    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        # It has to run by then: starting it, as the first child of multiprocessing does, unblocks SIGINT.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def start_without_ctrl_c(process: BaseProcess) -> None:
    """Start a process that its parent ends, not the terminal."""
    with ctrl_c_blocked():
        process.start()
