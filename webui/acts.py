"""What a page may have done: start, stop, resume, export, film, and calls of the planner's sessions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from dayshift.engine.api import Message, RecallMode, SamplingParams, TurnRequest
from dayshift.engine.client import DayshiftClient
from dayshift.types import DayshiftError
from dayshift.webui import protocol as ask
from dayshift.webui.film import FilmOptions, make_film
from dayshift.webui.launcher import Launcher
from dayshift.webui.library import Library, OpenRun
from dayshift.webui.tasks import Task, Tasks

FILMS = "films"
DATASETS = "datasets"
_MAX_REPLY_TOKENS = 256
_FIRST_RECORD_S = 30.0  # until a started run can be opened


class Desk:
    """Does what pages ask for. `launcher` None: runs cannot be started from here."""

    def __init__(self, library: Library, launcher: Launcher | None, *, is_read_only: bool) -> None:
        self._library = library
        self._launcher = launcher
        self.is_read_only = is_read_only
        self.tasks = Tasks()

    @property
    def can_launch(self) -> bool:
        return self._launcher is not None and not self.is_read_only

    async def do(self, run: OpenRun | None, act: ask.Question) -> Any:
        """Carry out an act, or answer a question that is not about a run's records. Raises DayshiftError."""
        if isinstance(act, ask.Act) and self.is_read_only:
            raise DayshiftError("this page is read-only")
        match act:
            case ask.ListRuns():
                entries = await asyncio.to_thread(self._library.entries)
                return {
                    "runs": [asdict(entry) for entry in entries],
                    "is_read_only": self.is_read_only,
                    "can_launch": self.can_launch,
                }
            case ask.AskTasks():
                return [self._describe(task) for task in self.tasks.tasks]
            case ask.AskSchema():
                launcher = self._needed_launcher()
                return {"schema": launcher.schema(), "experiments": launcher.experiments()}
            case ask.Check():
                return await asyncio.to_thread(self._check, act.yaml)
            case ask.Start():
                launched = await asyncio.to_thread(self._needed_launcher().start, act.yaml)
                return await self._wait_until_open(launched.run_dir)
        if run is None:
            raise DayshiftError("open a run first")
        match act:
            case ask.Stop():
                return _stop(run)
            case ask.Resume():
                if run.live.is_live:
                    raise DayshiftError(f"{run.name} is going on")
                await asyncio.to_thread(self._needed_launcher().resume, run.path)
                return None
            case ask.Export():
                return self._describe(self._export(run, act))
            case ask.MakeFilm():
                return self._describe(self._film(run, act))
        return await asyncio.to_thread(_call_engine, run, act)

    def _needed_launcher(self) -> Launcher:
        if self._launcher is None:
            raise DayshiftError("runs cannot be started from this page; start it with `dayshift ui`")
        return self._launcher

    def _check(self, yaml: str) -> str | None:
        try:
            self._needed_launcher().check(yaml)
        except DayshiftError as error:
            return str(error)
        return None

    async def _wait_until_open(self, run_dir: Path) -> str:
        """The new run's name, or that of its first arm, once it can be opened."""
        give_up_at = time.monotonic() + _FIRST_RECORD_S
        while time.monotonic() < give_up_at:
            for entry in await asyncio.to_thread(self._library.entries):
                path = self._library.runs_dir / entry.run
                if run_dir in (path, path.parent):
                    with contextlib.suppress(DayshiftError):  # its database is there, but still empty
                        return (await self._library.open(entry.run)).name
            await asyncio.sleep(0.2)
        raise DayshiftError(f"{run_dir.name} was started but has recorded nothing yet")

    def _export(self, run: OpenRun, act: ask.Export) -> Task:
        to = self._free_path(DATASETS, run.name.replace("/", "."))
        run_dir = run.path

        def work(report: Callable[[int, int], None]) -> tuple[Path, str]:
            # It loads Hugging Face's datasets: seconds that a page without exports does not need.
            from dayshift.dataset_export.export import ExportOptions, export_dataset

            done = export_dataset([run_dir], to, ExportOptions(only=act.only), on_progress=report)
            skipped = f", {len(done.skipped)} skipped" if done.skipped else ""
            return to, f"{done.num_added} episodes, {done.num_frames} frames{skipped}"

        return self.tasks.start(f"Dataset of {run.name}", work)

    def _film(self, run: OpenRun, act: ask.MakeFilm) -> Task:
        to = self._free_path(FILMS, run.name.replace("/", "."), ".mp4")
        options = FilmOptions(speed=act.speed, review_speed=act.review_speed, robot=act.robot)
        run_dir = run.path

        def work(report: Callable[[int, int], None]) -> tuple[Path, str]:
            film = make_film(run_dir, to, options, on_progress=report)
            return to, f"{film.num_frames} frames, {film.duration_s:.0f} s"

        return self.tasks.start(f"Film of {run.name}", work)

    def _free_path(self, folder: str, name: str, suffix: str = "") -> Path:
        """A path that is not taken, in a folder beside the runs."""
        parent = self._library.runs_dir.resolve().parent / folder
        parent.mkdir(exist_ok=True)
        numbered = (f"{name}-{number}{suffix}" for number in itertools.count(2))
        return next(
            parent / one for one in itertools.chain([name + suffix], numbered) if not (parent / one).exists()
        )

    def _describe(self, task: Task) -> dict[str, Any]:
        return {
            **{key: value for key, value in asdict(task).items() if key != "result"},
            "result": str(task.result) if task.result else None,
            "can_download": task.result is not None and task.result.suffix == ".mp4",
        }

    async def close(self) -> None:
        await self.tasks.close()


def _stop(run: OpenRun) -> None:
    if run.live.hello is None:
        raise DayshiftError(f"{run.name} is not going on")
    os.kill(run.live.hello.process_id, signal.SIGTERM)


def _call_engine(run: OpenRun, act: ask.Question) -> Any:
    """Calls of the run's engine; blocks."""
    url = run.live.hello.engine_url if run.live.hello else None
    if url is None:
        raise DayshiftError("no engine runs for this run; its sessions are on the disk until it goes on")
    with DayshiftClient(url, timeout_s=60.0) as client:
        match act:
            case ask.AskSessions():
                return [
                    {key: value for key, value in msgspec.to_builtins(info).items() if key != "turns"}
                    | {"num_turns": len(info.turns)}
                    for info in client.sessions()
                ]
            case ask.AskSession():
                return msgspec.to_builtins(client.session(act.session_id))
            case ask.Park():
                return msgspec.to_builtins(client.park_session(act.session_id))
            case ask.Fork():
                return msgspec.to_builtins(client.fork_session(act.session_id, act.new_id))
            case ask.AskPlanner():
                return _ask_planner(client, act, run.now())
    raise DayshiftError(f"cannot do {type(act).__name__}")


def _ask_planner(client: DayshiftClient, act: ask.AskPlanner, at: float) -> dict[str, Any]:
    session_id = act.session_id
    if not act.is_in_session:
        session_id = f"question-{uuid.uuid4().hex[:12]}"
        client.fork_session(act.session_id, session_id)
    try:
        result = client.turn(
            TurnRequest(
                request_id=uuid.uuid4().hex,
                session_id=session_id,
                at=at,
                messages=(Message("user", act.text),),
                sampling=SamplingParams(max_tokens=_MAX_REPLY_TOKENS),
                recall_mode=RecallMode.KV,
            )
        )
    finally:
        if not act.is_in_session:
            client.close_session(session_id)
    return {"text": result.text, "ledger": msgspec.to_builtins(result.ledger)}
