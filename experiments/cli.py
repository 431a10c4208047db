"""The command `dayshift`.

Every mistake ends as one line on stderr and an exit code: 2 for the command line and the
configuration, 130 for Ctrl-C, 1 for everything else. `--json` keeps stdout for one JSON object.

Signals are seen to before anything is imported that takes its time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dayshift.experiments.interrupts import INTERRUPTED, end_at_once, end_in_order, raise_if_interrupted


def main() -> None:
    """Entry point of the command; ends the process."""
    end_with(lambda: _run(sys.argv[1:]))


def end_with(command: Callable[[], int | None]) -> NoReturn:
    """Runs what this process is for, and ends it with the exit code."""
    end_in_order()
    _open_standard_streams()
    try:
        code = guarded(command)
        end_at_once()
    except KeyboardInterrupt:  # in between
        end_at_once()
        code = INTERRUPTED
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """`dayshift ARGUMENTS` in this process; returns the exit code."""
    return guarded(lambda: _run(arguments))


def guarded(command: Callable[[], int | None]) -> int:
    """Runs a command and returns the exit code; says in one line what went wrong."""
    try:
        return _explained(command)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _run(arguments: Sequence[str]) -> int:
    from dayshift.experiments.commands.app import app

    raise_if_interrupted()
    code = app(args=list(arguments), prog_name="dayshift", standalone_mode=False) or 0
    if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        raise KeyboardInterrupt
    return code


def _explained(command: Callable[[], int | None]) -> int:
    from dayshift.experiments.errors import StoppedByUserError, traceback_kept_in
    from dayshift.experiments.yaml_tree import ConfigError
    from dayshift.types import DayshiftError

    try:
        with traceback_kept_in():
            return _understood(command)
    except ConfigError as error:
        return _fail(error, 2)
    except StoppedByUserError as error:
        return _fail(error, INTERRUPTED)
    except DayshiftError as error:
        return _fail(error, 1)


def _understood(command: Callable[[], int | None]) -> int:
    import typer

    try:
        return command() or 0
    except typer.TyperException as error:
        message = error.format_message()  # none where the usage is all there is to say, and has been said
        return _fail(message, error.exit_code) if message else error.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    except BrokenPipeError:  # whoever read our output has gone; nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _fail(reason: object, code: int) -> int:
    print(f"dayshift: {' '.join(str(reason).split())}", file=sys.stderr, flush=True)
    return code


def _open_standard_streams() -> None:
    """Opens what the caller closed of stdin, stdout and stderr.

    Otherwise the next socket or file takes the number, and whoever prints writes into it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115  as long as the process
