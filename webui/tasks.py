"""Work that a page has asked for and that takes its time: exports and films, one at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)
_MAX_KEPT = 50


@dataclass(slots=True, kw_only=True)
class Task:
    """How far a piece of work is. `result` is a file or folder beside the runs."""

    task_id: int
    title: str
    state: str = "waiting"  # waiting, running, done, failed
    num_done: int = 0
    num_total: int = 0
    detail: str = ""
    result: Path | None = None


class Tasks:
    """Runs tasks one after the other in a thread. Close it after use."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "page-tasks")
        self._ids = itertools.count(1)
        self.tasks: list[Task] = []

    def start(self, title: str, work: Callable[[Callable[[int, int], None]], tuple[Path, str]]) -> Task:
        """Queue work; it is given what reports its progress, and returns its result and a line about it."""
        task = Task(task_id=next(self._ids), title=title)
        self.tasks = [*self.tasks[-_MAX_KEPT:], task]

        def report(num_done: int, num_total: int) -> None:
            task.num_done, task.num_total = num_done, num_total

        def run() -> None:
            task.state = "running"
            try:
                task.result, task.detail = work(report)
                task.state = "done"
            except DayshiftError as error:
                task.state, task.detail = "failed", str(error)
            except Exception:
                logger.exception("%s", title)
                task.state, task.detail = "failed", "an error in Dayshift; see the page's log"

        self._thread.submit(run)
        return task

    async def close(self) -> None:
        """Wait for the running task; those that wait are dropped."""
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
