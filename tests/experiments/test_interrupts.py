"""Interrupts where Python loses their exceptions, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

LOSSES = {
    "in a weak reference's callback": """
class Thing: pass
thing = Thing()
reference = weakref.ref(thing, lambda _: signal.raise_signal(NUMBER))
del thing
""",
    "in __del__": """
class Thing:
    def __del__(self): signal.raise_signal(NUMBER)
Thing()
""",
    "in a library that catches everything": """
try:
    signal.raise_signal(NUMBER)
except:
    pass
""",
    "in the text that a dataclass runs": """
try:
    exec("signal.raise_signal(NUMBER)")
finally:
    closed = True
""",
}
PROGRAM = """
import signal, sys, weakref
from dayshift.experiments.cli import guarded
from dayshift.experiments.interrupts import end_in_order, raise_if_interrupted
NUMBER = signal.Signals[sys.argv[1]]

def command():
    end_in_order()
    exec(sys.argv[2], globals())
    print("went on")
    raise_if_interrupted()

sys.exit(guarded(command))
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str, str], subprocess.CompletedProcess[str]]:
    """Runs the program as the command is run: `python -m` chooses the exit code in a way of its own."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(number: str, text: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "program", number, text]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    return run


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("where", LOSSES)
def test_a_lost_interrupt_is_raised_again_in_one_line(run, number, where) -> None:
    ended = run(number, LOSSES[where])
    is_lost = "dataclass" not in where
    assert (ended.returncode, ended.stdout) == (130, "went on\n" * is_lost)
    assert ended.stderr == "dayshift: interrupted\n"


def test_what_is_lost_besides_interrupts_is_still_printed(run) -> None:
    ended = run(
        "SIGINT", "class Thing:\n    def __del__(self): raise RuntimeError('of another kind')\nThing()"
    )
    assert (ended.returncode, ended.stdout) == (0, "went on\n")
    assert "RuntimeError: of another kind" in ended.stderr


def test_a_signal_that_the_caller_had_ignored_stays_ignored(run) -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        ended = run("SIGHUP", "signal.raise_signal(NUMBER)")
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")
