"""What the page can have done outside of itself. `experiments` implements it and injects it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRun:
    """A run that was started in a process of its own."""

    run_dir: Path
    process_id: int


class Launcher(Protocol):
    """Starts and goes on with runs. Methods block for seconds at most; errors are DayshiftErrors."""

    def schema(self) -> dict[str, Any]:
        """The JSON Schema of an experiment."""
        ...

    def experiments(self) -> dict[str, str]:
        """The experiments that come with Dayshift: name -> YAML."""
        ...

    def check(self, yaml: str) -> None:
        """Raise DayshiftError, in one line, when the text is no experiment."""
        ...

    def start(self, yaml: str) -> LaunchedRun:
        """Start an experiment; returns once its folder is there. Raises DayshiftError."""
        ...

    def resume(self, run_dir: Path) -> LaunchedRun:
        """Go on with a run. Raises DayshiftError."""
        ...


Progress = Callable[[int, int], None]  # done, total
