"""The runs of a folder, and those of them that pages look at."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dayshift.types import DayshiftError
from dayshift.webui.board import Totals
from dayshift.webui.exact import ExactRenderer
from dayshift.webui.live import LiveRun
from dayshift.webui.pictures import Pictures
from dayshift.webui.records import has_records
from dayshift.webui.run_index import RunIndex
from dayshift.webui.wire import SOCKET

logger = logging.getLogger(__name__)
REFRESH_S = 0.5  # how often a run that goes on is read again
_MAX_DEPTH = 2  # runs/<id>, and runs/<experiment>/<arm> of a matrix


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run as the list of runs shows it."""

    run: str  # its folder, relative to the folder of runs
    modified_at: float  # Unix time
    may_be_live: bool


class Library:
    """Opens each run once, for all pages. Close it after use."""

    def __init__(self, runs_dir: Path) -> None:
        self.runs_dir = runs_dir
        self._open: dict[str, OpenRun] = {}
        self._opening = asyncio.Lock()
        self.renderer = ExactRenderer()

    def entries(self) -> list[RunEntry]:
        """All runs, the newest first."""
        entries = [
            RunEntry(
                run=str(path.relative_to(self.runs_dir)),
                modified_at=path.stat().st_mtime,
                may_be_live=(path / SOCKET).exists(),
            )
            for path in _find_runs(self.runs_dir, _MAX_DEPTH)
        ]
        return sorted(entries, key=lambda entry: (entry.may_be_live, entry.modified_at), reverse=True)

    async def open(self, run: str) -> OpenRun:
        """A run by its name in `entries`. Raises DayshiftError."""
        async with self._opening:
            if run not in self._open:
                if run not in {entry.run for entry in self.entries()}:
                    raise DayshiftError(f"{run}: no such run in {self.runs_dir}")
                self._open[run] = await OpenRun.open(run, self.runs_dir / run, self.renderer)
            return self._open[run]

    async def open_newest(self) -> None:
        """Read the newest run before a page asks for it: it is the likeliest to be looked at."""
        for entry in self.entries()[:1]:
            with contextlib.suppress(DayshiftError):  # a page that asks for it will be told
                await self.open(entry.run)

    async def close(self) -> None:
        for run in self._open.values():
            await run.close()
        self.renderer.close()


class OpenRun:
    """A run that pages look at: its index and pictures, kept up to date while it goes on.

    Index and pictures are used in one thread of their own: `call`.
    """

    def __init__(
        self, name: str, path: Path, index: RunIndex, thread: ThreadPoolExecutor, renderer: ExactRenderer
    ) -> None:
        self.name = name
        self.path = path
        self.index = index
        self.renderer = renderer
        self.pictures = Pictures(path, index.run.fps)
        self._numbers = {row.robot: number for number, row in enumerate(index.robot_rows)}
        self._totals_of, self._totals = -1, Totals(0, {})
        self._thread = thread
        self._news = asyncio.Event()
        self.news_number = 0
        self.live = LiveRun(path, self._notify)
        self._refreshing = asyncio.create_task(self._refresh_forever())

    @classmethod
    async def open(cls, name: str, path: Path, renderer: ExactRenderer) -> OpenRun:
        """Raises DayshiftError when the run cannot be read."""
        thread = ThreadPoolExecutor(1, f"run-{name}")
        try:
            index = await asyncio.get_running_loop().run_in_executor(thread, RunIndex, path)
        except BaseException:
            thread.shutdown()
            raise
        run = cls(name, path, index, thread, renderer)
        await run.live.look()
        return run

    async def call[**P, R](self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run something that uses `index` or `pictures`, in their thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def number_of(self, robot: str) -> int:
        """A robot's number on the wire: its place in the list of robots. Raises KeyError."""
        return self._numbers[robot]

    def totals(self) -> Totals:
        """Of the index as it is now."""
        if self._totals_of != self.index.revision:
            self._totals_of, self._totals = self.index.revision, Totals.of(self.index.robots)
        return self._totals

    def now(self) -> float:
        """The run clock's time: of a run that goes on, now; else when it ended."""
        return max(self.live.now(), self.index.end_s) if self.live.is_live else self.index.end_s

    async def wait_for_news(self, seen: int, patience_s: float) -> None:
        """Return when something has happened after news number `seen`, or after `patience_s`."""
        if self.news_number == seen:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), patience_s)

    def _notify(self) -> None:
        self.news_number += 1
        self._news.set()
        self._news = asyncio.Event()

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                has_news = await self.call(self.index.refresh)
            except DayshiftError as error:  # for example locked for long; the next look may succeed
                logger.warning("%s", error)
                continue
            if has_news:
                self._notify()

    async def close(self) -> None:
        self._refreshing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._refreshing
        await self.live.close()
        await self.call(self.index.close)
        await self.call(self.pictures.close)
        self._thread.shutdown()


def _find_runs(folder: Path, depth: int) -> list[Path]:
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        if path.is_dir() and not path.name.startswith("."):
            if has_records(path):
                found.append(path)
            elif depth > 1:
                found += _find_runs(path, depth - 1)
    return found
