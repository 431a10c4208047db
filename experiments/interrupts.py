"""Ctrl-C and requests to terminate, as an exception that is not lost and an exit code that stays.

The command line imports this first: standard library only.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from dayshift.processes import asked_to_end

INTERRUPTED = 130  # the exit code
INTERRUPT_CHECK_S = 1.0  # how long the main thread waits before it calls `raise_if_interrupted`
_SAME_WISH_S = 1.0  # a terminal's Ctrl-C, pressed twice, or together with a parent's SIGTERM
_RAISED_AGAIN_AFTER_S = 0.05


class InterruptedByUser(KeyboardInterrupt):
    """A signal asked this process to end.

    A class of its own, because CPython remembers each KeyboardInterrupt that leaves an `exec` of text, as
    dataclasses and named tuples do while modules are imported: the process then ends by SIGINT, whatever
    exit code it was given. Of a subclass it does not.
    """


def end_in_order() -> None:
    """Has Ctrl-C, SIGTERM and SIGHUP raise InterruptedByUser in the main thread, which calls this.

    What this process was told to ignore, as `nohup` does, it goes on ignoring. Whoever asks again while
    everything is being closed gets the end at once: what is recorded survives that, and no child stays.
    """
    sys.unraisablehook = _raise_later
    atexit.register(_ignore)
    signal.signal(signal.SIGALRM, _raise_now)
    for number in asked_to_end():
        signal.signal(number, _interrupts.receive)
    # A command that somebody starts with the signals blocked, as pages do, is ended by them, too.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, asked_to_end())


def end_at_once() -> None:
    """From now on these signals end the process without a word: all has been said, Python shuts down."""
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    sys.unraisablehook = _silent_for_interrupts
    for number in asked_to_end():
        signal.signal(number, lambda *_: os._exit(INTERRUPTED))


def _ignore() -> None:
    """Called last of all: Python then gives signals back their own effect, with exit codes of its own."""
    for number in asked_to_end():
        signal.signal(number, signal.SIG_IGN)


def raise_if_interrupted() -> None:
    """Raises InterruptedByUser if such a signal has come: called while the main thread waits.

    Libraries have handlers that catch everything.
    """
    if _interrupts.received_at is not None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        raise InterruptedByUser


class _Interrupts:
    received_at: float | None = None  # of `time.monotonic`; the first one

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.received_at is None:
            self.received_at = time.monotonic()
            raise InterruptedByUser
        if time.monotonic() - self.received_at > _SAME_WISH_S:
            os.write(2, b"dayshift: interrupted again; ended at once\n")
            os._exit(INTERRUPTED)


_interrupts = _Interrupts()


def _raise_now(number: int, frame: FrameType | None) -> None:
    raise InterruptedByUser


def _raise_later(unraisable: Any) -> None:
    """`sys.unraisablehook`: an interrupt that got lost isn't printed, but raised again.

    An exception raised within the callback of a weak reference (importlib has one for each import) or
    within `__del__` goes no further.
    """
    _silent_for_interrupts(unraisable)
    if unraisable.exc_type is InterruptedByUser:
        signal.setitimer(signal.ITIMER_REAL, _RAISED_AGAIN_AFTER_S)


def _silent_for_interrupts(unraisable: Any) -> None:
    if unraisable.exc_type is not InterruptedByUser:
        sys.__unraisablehook__(unraisable)
