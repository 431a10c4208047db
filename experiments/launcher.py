"""Runs started from the page: each is a `dayshift run` of its own, which outlives the page."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dayshift.experiments.config import Experiment
from dayshift.experiments.loading import load_arms, packaged_experiments, packaged_text
from dayshift.types import DayshiftError
from dayshift.webui.launcher import LaunchedRun

_STARTED = ".started"  # in the folder of runs: what was pasted, and what the runs said
_FOLDER_PATIENCE_S = 60.0  # a run makes its folder before anything slow, but Python has to start


class ProcessLauncher:
    """A `webui.launcher.Launcher` for the runs of one folder."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir
        self._processes: list[subprocess.Popen[bytes]] = []

    def schema(self) -> dict[str, Any]:
        return Experiment.model_json_schema()

    def experiments(self) -> dict[str, str]:
        """Those that stand alone: a pasted text has no folder to extend a file from."""
        texts = {name: packaged_text(name) for name in packaged_experiments()}
        return {name: text for name, text in texts.items() if not _extends(text)}

    def check(self, yaml: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "experiment.yaml"
            path.write_text(yaml, encoding="utf-8")
            try:
                load_arms(path)
            except DayshiftError as error:
                raise DayshiftError(str(error).replace(f"{path}:", "line ").replace(str(path), "")) from error

    def start(self, yaml: str) -> LaunchedRun:
        self.check(yaml)
        started = self._runs_dir / _STARTED
        started.mkdir(parents=True, exist_ok=True)
        path = started / f"{time.time_ns()}.yaml"
        path.write_text(yaml, encoding="utf-8")
        before = self._folders()
        process, log = self._run([str(path), "--runs-dir", str(self._runs_dir)])
        give_up_at = time.monotonic() + _FOLDER_PATIENCE_S
        while time.monotonic() < give_up_at:
            if new := self._folders() - before:
                return LaunchedRun(run_dir=max(new), process_id=process.pid)
            if process.poll() is not None:
                raise DayshiftError(f"the run ended at once: {_last_line(log)}")
            time.sleep(0.1)
        raise DayshiftError(f"the run has made no folder within {_FOLDER_PATIENCE_S:.0f} s (see {log})")

    def resume(self, run_dir: Path) -> LaunchedRun:
        (self._runs_dir / _STARTED).mkdir(parents=True, exist_ok=True)
        process, _ = self._run(["--resume", str(run_dir)])
        return LaunchedRun(run_dir=run_dir, process_id=process.pid)

    def _folders(self) -> set[Path]:
        return {path for path in self._runs_dir.iterdir() if path.is_dir() and not path.name.startswith(".")}

    def _run(self, arguments: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        """Start `dayshift run` in a session of its own: Ctrl-C in the page's terminal is not for it."""
        log = self._runs_dir / _STARTED / f"{time.time_ns()}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "dayshift", "run", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes = [one for one in self._processes if one.poll() is None]  # and reap the others
        self._processes.append(process)
        return process, log


def _extends(yaml: str) -> bool:
    return any(line.startswith("extends:") for line in yaml.splitlines())


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
