"""The command in a process of its own, as its users start it, and the processes that it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Dayshift = Callable[..., subprocess.CompletedProcess[str]]


class Terminal:
    """`dayshift ARGUMENTS` in a process group of its own, its stderr read line by line."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dayshift", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []

    def wait_for(self, text: str) -> str:
        """Read stderr until a line holds `text`, and return it."""
        assert self._process.stderr
        for line in self._process.stderr:
            self.lines.append(line.rstrip("\n"))
            if text in line:
                return self.lines[-1]
        raise AssertionError(f"ended before {text!r}: {self.lines}")

    def wait_until_it_handles_signals(self) -> None:
        """Some milliseconds; before, Python itself starts."""
        status = Path(f"/proc/{self._process.pid}/status")
        while not _caught(status.read_text()) >> (signal.SIGHUP - 1) & 1:
            time.sleep(0.001)

    def press_ctrl_c(self) -> None:
        """As a terminal does: the signal goes to every process of the group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def press_ctrl_c_twice(self) -> None:
        """As fingers do."""
        self.press_ctrl_c()
        time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):  # it was quicker
            self.press_ctrl_c()

    def close_window(self) -> None:
        """As a terminal does when its window is closed: SIGHUP to every process of the group."""
        os.killpg(self._process.pid, signal.SIGHUP)

    def terminate(self) -> None:
        """SIGTERM to the command alone."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the command alone."""
        self._process.kill()

    def descendants(self) -> set[int]:
        """All processes below the command."""
        return set(_below(self._process.pid))

    @staticmethod
    def still_alive(process_ids: set[int], patience_s: float = 15.0) -> set[int]:
        """Those of the processes that are still there when patience ends; zombies count as gone."""
        give_up_at = time.monotonic() + patience_s
        while (left := {pid for pid in process_ids if _is_alive(pid)}) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        return left

    def end(self) -> tuple[int, str]:
        """Wait; returns exit code and stdout."""
        out, err = self._process.communicate(timeout=120)
        self.lines += err.splitlines()
        return self._process.returncode, out


def _below(process_id: int) -> Iterator[int]:
    try:
        tasks = list(Path(f"/proc/{process_id}/task").iterdir())
        children = " ".join((task / "children").read_text() for task in tasks)
    except FileNotFoundError:
        return
    for child in map(int, children.split()):
        yield child
        yield from _below(child)


def _caught(status: str) -> int:
    """The signals for which a process has a handler, bit by bit."""
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))


def _is_alive(process_id: int) -> bool:
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def dayshift(tmp_path: Path) -> Dayshift:
    """Runs `dayshift ARGUMENTS` in a fresh folder, with stdin closed, and returns how it ended."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", 'exec "$0" -m dayshift "$@" <&-', sys.executable, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )

    return run


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts `dayshift ARGUMENTS` in a fresh folder as a terminal does; what is left is killed."""
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.end()


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A folder that looks like a model until it is loaded."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder
