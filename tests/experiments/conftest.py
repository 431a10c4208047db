"""The command in a process of its own, as its users start it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Dayshift = Callable[..., subprocess.CompletedProcess[str]]


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
