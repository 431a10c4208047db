"""Interrupts where Python loses their exceptions, each in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dayshift.processes import ctrl_c_blocked

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
import atexit, signal, sys, time, weakref
from dayshift.experiments.cli import end_with
from dayshift.experiments.interrupts import raise_if_interrupted
NUMBER = signal.Signals[sys.argv[1]]

def command():
    exec(sys.argv[2], globals())
    print("went on", flush=True)
    raise_if_interrupted()

end_with(command)
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


@pytest.mark.parametrize("where", ["in a weak reference's callback", "in __del__"])
def test_an_interrupt_that_python_says_is_lost_ends_a_command_that_never_asks(run, where) -> None:
    ended = run("SIGTERM", LOSSES[where] + "time.sleep(600)\n")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "dayshift: interrupted\n")


def test_ctrl_c_pressed_twice_is_one_wish(run) -> None:
    text = "try: signal.raise_signal(NUMBER)\nfinally: signal.raise_signal(NUMBER); print('closed')\n"
    ended = run("SIGINT", text)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "closed\n", "dayshift: interrupted\n")


def test_who_asks_again_while_it_closes_gets_the_end_at_once(run) -> None:
    asking = "    for _ in range(600): signal.raise_signal(NUMBER); time.sleep(0.1)\n"
    ended = run("SIGTERM", f"try: signal.raise_signal(NUMBER)\nfinally:\n{asking}    print('closed')\n")
    again = "dayshift: interrupted again; ended at once\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", again)


def test_a_signal_while_python_shuts_down_ends_it_without_a_word(run) -> None:
    ended = run("SIGINT", "atexit.register(signal.raise_signal, NUMBER)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "went on\n", "")


def test_a_signal_while_modules_are_torn_down_changes_nothing(run) -> None:
    text = "class Thing:\n    def __del__(self, send=signal.raise_signal, number=NUMBER): send(number)\n"
    ended = run("SIGTERM", text + "sys.kept_to_the_end = Thing()")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "went on\n", "")


def test_a_command_that_is_started_with_ctrl_c_blocked_is_ended_by_it(run) -> None:
    with ctrl_c_blocked():  # as pages start runs
        ended = run("SIGINT", "signal.raise_signal(NUMBER)")
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "dayshift: interrupted\n")


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
