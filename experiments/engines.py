"""Our engine for the planners of a run: its server in a process of its own, which ends with the run.

    run ◄─ pipe ─► server process (HTTP front) ◄─► core process (model)

The pipe brings the server's URL once it answers; when the run's end of it closes, however that
happens, the server shuts down, and the core with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from dayshift.engine.config import EngineConfig
from dayshift.engine.servable import PolicySource
from dayshift.experiments.config import Experiment
from dayshift.experiments.interrupts import INTERRUPT_CHECK_S, raise_if_interrupted
from dayshift.experiments.planners import default_model_folder, engine_model
from dayshift.experiments.policies import served_policies
from dayshift.planner.memory import MemoryArm
from dayshift.processes import start_without_ctrl_c
from dayshift.types import DayshiftError

_GIB = 2**30
_CLOSE_PATIENCE_S = 15.0


class Engines:
    """The engine of an experiment's runs; runs with the same model and settings share it.

    Use as a context manager: no process is left behind.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engine: EngineServer | None = None

    def start(self, experiment: Experiment) -> EngineServer | None:
        """The engine that a run needs, started if it is not there; None when it needs none of ours."""
        planner = experiment.planner
        policies = served_policies(experiment.policy, device=experiment.engine.device)
        if not (_plans_with_our_engine(experiment) or policies):
            return None
        config = self._config(experiment, policies)
        if self._engine is None or self._engine.config != config:
            self.close()
            self._engine = EngineServer(
                config, model_name=planner.model, port=experiment.engine.port, log=self._folder / "engine.log"
            )
        return self._engine

    def _config(self, experiment: Experiment, policies: tuple[PolicySource, ...]) -> EngineConfig:
        settings = experiment.engine
        does_plan = _plans_with_our_engine(experiment)
        return EngineConfig(
            model=engine_model(experiment.planner) if does_plan else str(default_model_folder()),
            policies=policies,
            device=settings.device,
            dtype=settings.dtype,
            kv_cache_bytes=_num_bytes(settings.kv_cache_gib),
            host_kv_bytes=_num_bytes(settings.host_kv_gib),
            store_dir=self._folder / "sessions",
            kv_cache_dtype=settings.kv_cache_dtype,
            kv_at_rest=settings.kv_at_rest,
            store_quota_bytes=_num_bytes(settings.store_quota_gib),
        )

    def close(self) -> None:
        """End the engine, if there is one."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _num_bytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * _GIB)


def _plans_with_our_engine(experiment: Experiment) -> bool:
    planner = experiment.planner
    return not (planner.memory is MemoryArm.ORACLE or planner.base_url or experiment.engine.url)


@dataclass(frozen=True, slots=True)
class _Ready:
    url: str


@dataclass(frozen=True, slots=True)
class _Refused:
    reason: str


class EngineServer:
    """A server process; what it and the core print goes to `log`."""

    def __init__(self, config: EngineConfig, *, model_name: str, port: int, log: Path) -> None:
        self.config = config
        self._log = log
        self._url: str | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("spawn")
        self._connection, far_end = context.Pipe()
        # Not a daemon: multiprocessing would not let it start the core.
        self._process = context.Process(
            target=_serve, args=(far_end, config, model_name, port, log), name="engine-server"
        )
        start_without_ctrl_c(self._process)
        far_end.close()

    def url(self) -> str:
        """The server's address; waits until it answers. Raises DayshiftError when it cannot start."""
        if self._url is None:
            try:
                while not self._connection.poll(INTERRUPT_CHECK_S):
                    raise_if_interrupted()
                answer: _Ready | _Refused = self._connection.recv()
            except EOFError:
                self._process.join()
                answer = _Refused(f"its process ended (exit code {self._process.exitcode})")
            if isinstance(answer, _Refused):
                raise DayshiftError(f"the engine cannot start: {answer.reason} (log: {self._log})")
            self._url = answer.url
        return self._url

    def close(self) -> None:
        """End the server and its core."""
        self._connection.close()
        self._process.join(_CLOSE_PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()  # the core ends with it
            self._process.join()


def _serve(connection: Connection, config: EngineConfig, model_name: str, port: int, log: Path) -> None:
    """Main function of the server process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True).start()
    from dayshift.engine.server import serve

    try:
        serve(config, port=port, model_name=model_name, on_ready=lambda url: connection.send(_Ready(url)))
    except DayshiftError as error:
        connection.send(_Refused(str(error)))


def _end_with_parent(connection: Connection) -> None:
    """Ends this process in order when the run has closed its end of the pipe, or has ended."""
    try:
        connection.recv()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
