"""Ctrl-C and requests to terminate, as an exception that is not lost and an exit code that stays."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

INTERRUPT_CHECK_S = 1.0  # how long the main thread waits before it calls `raise_if_interrupted`

_received = threading.Event()


class InterruptedByUser(KeyboardInterrupt):
    """A signal asked this process to end.

    A class of its own, because CPython remembers each KeyboardInterrupt that leaves an `exec` of text, as
    dataclasses and named tuples do while modules are imported: the process then ends by SIGINT, whatever
    exit code it was given. Of a subclass it does not.
    """


def end_in_order() -> None:
    """Has Ctrl-C, SIGTERM and SIGHUP raise InterruptedByUser in the main thread, which calls this.

    What this process was told to ignore, as `nohup` does, it goes on ignoring.
    """
    sys.unraisablehook = _silent_for_interrupts
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)


def raise_if_interrupted() -> None:
    """Raises InterruptedByUser if such a signal has come: called while the main thread waits.

    An exception raised within the callback of a weak reference (importlib has one for each import) or
    within `__del__` goes no further, and libraries have handlers that catch everything.
    """
    if _received.is_set():
        raise InterruptedByUser


def _raise(number: int, frame: FrameType | None) -> None:
    _received.set()
    raise InterruptedByUser


def _silent_for_interrupts(unraisable: Any) -> None:
    """`sys.unraisablehook`: an interrupt that got lost isn't printed, since it is raised again."""
    if unraisable.exc_type is not InterruptedByUser:
        sys.__unraisablehook__(unraisable)
