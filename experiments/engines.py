"""Our engine for the planners of a run, started where none is running."""

from __future__ import annotations

from pathlib import Path

from dayshift.experiments.loading import Arm


class Engines:
    """The engines of an experiment's arms; arms with the same model share one. Use as a context manager."""

    def __init__(self, store_dir: Path) -> None:
        self._store_dir = store_dir

    def start(self, arm: Arm):
        return None

    def __enter__(self):
        return self

    def __exit__(self, *a):
        pass
