"""One supervised process per live robot: a crash or a hang costs one attempt, never the run."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from dayshift.processes import start_without_ctrl_c
from dayshift.sim.faults import Disturbance
from dayshift.sim.libero_env import check_start
from dayshift.sim.libero_setup import prepare_libero
from dayshift.sim.simulator_process import (
    Broken,
    Cancel,
    Cancelled,
    Ready,
    Refused,
    receive,
    send,
    serve_rollouts,
)
from dayshift.sim.tasks import find_task
from dayshift.sim.types import (
    Frame,
    OnFrame,
    OnStart,
    PolicyFactory,
    RolloutResult,
    RolloutSpec,
    RolloutStart,
)
from dayshift.types import DayshiftError, Outcome

START_TIMEOUT_S = 180.0  # the first simulator of a run compiles the scene and numba's functions
HANG_TIMEOUT_S = 60.0  # without a message; a control step takes 10 ms, a policy's answer seconds
POLL_S = 0.1
CLOSE_TIMEOUT_S = 2.0


class SimulatorDiedError(Exception):
    """The robot's process crashed or hung; the message says how, in one line."""


class CancelledError(Exception):
    """The rollout was ended as asked."""


class RobotSimulator:
    """Runs one robot's rollouts in a process of its own, which is started when first needed.

    `make_policy` is called once in that process, with its `LiberoEnv`; it must be picklable (a module's
    function, a class, a `functools.partial` of one). One rollout at a time; `run` may be called from
    any thread. Close it, or use it as a context manager: no process is left behind.
    """

    def __init__(self, make_policy: PolicyFactory, *, hang_timeout_s: float = HANG_TIMEOUT_S) -> None:
        self._make_policy = make_policy
        self._hang_timeout_s = hang_timeout_s
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self.num_starts = 0

    @property
    def process_id(self) -> int | None:
        """Id of the robot's process, None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process now, if it isn't there. Raises DayshiftError, or SimulatorDiedError."""
        if self._process is not None and self._process.is_alive():
            return
        self._kill()
        prepare_libero()  # a mistake in the installation shows here, in one line
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["dayshift.sim.warm"])
        connection, child_end = context.Pipe()
        process = context.Process(
            target=serve_rollouts, args=(child_end, self._make_policy), daemon=True, name="robot-simulator"
        )
        try:
            start_without_ctrl_c(process)
        except (EOFError, ConnectionError) as error:
            connection.close()
            raise SimulatorDiedError("simulators' fork server died; it is started again") from error
        finally:
            child_end.close()
        self._process, self._connection = process, connection
        self.num_starts += 1
        for message in self._messages(START_TIMEOUT_S):
            match message:
                case Ready():
                    return
                case Refused(detail):
                    self._kill()
                    raise DayshiftError(detail)

    def run(
        self,
        spec: RolloutSpec,
        on_start: OnStart,
        on_frame: OnFrame,
        cancel: threading.Event | None = None,
    ) -> RolloutResult:
        """Run one rollout; callbacks are called in this thread as things happen.

        A crash, hang or exception in the robot's process, and a cancelled rollout, give the outcome
        INFRA; the next run starts a new process where needed. Raises DayshiftError for a mistake in the
        spec, and whatever a callback raises.
        """
        check_spec(spec)
        started_at = time.monotonic()
        num_frames = 0

        def count_and_pass_on(frame: Frame) -> None:
            nonlocal num_frames
            num_frames += 1
            on_frame(frame)

        try:
            self.start()
            self._send(spec)
            return self._follow(spec, on_start, count_and_pass_on, cancel or threading.Event())
        except CancelledError:
            detail = "cancelled"
        except SimulatorDiedError as error:
            self._kill()
            detail = str(error)
        except BaseException:  # a callback's, or Ctrl-C: the rollout has no one to report to
            self._kill()
            raise
        return RolloutResult(
            outcome=Outcome.INFRA,
            num_control_steps=num_frames,
            wall_s=time.monotonic() - started_at,
            detail=detail,
        )

    def close(self) -> None:
        """End the process: it is asked to, then killed."""
        if self._connection is not None:
            self._connection.close()  # it then ends by itself, unless it hangs
        if self._process is not None:
            self._process.join(CLOSE_TIMEOUT_S)
        self._kill()

    def _follow(
        self, spec: RolloutSpec, on_start: OnStart, on_frame: OnFrame, cancel: threading.Event
    ) -> RolloutResult:
        has_asked = False
        for message in self._messages(self._hang_timeout_s):
            match message:
                case RolloutStart():
                    on_start(spec, message)
                case Frame():
                    on_frame(message)
                case RolloutResult():
                    return message
                case Cancelled():
                    raise CancelledError
                case Broken(detail):
                    raise SimulatorDiedError(detail)
            if cancel.is_set() and not has_asked:
                self._send(Cancel())
                has_asked = True
        raise AssertionError("messages end with an exception only")

    def _messages(self, timeout_s: float) -> Iterator[Any]:
        """The process's messages as they come, and None now and then while there are none.

        Raises SimulatorDiedError when the process has ended or was silent for `timeout_s`.
        """
        assert self._connection is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not wait([self._connection], POLL_S):
                yield None
                continue
            try:
                message = receive(self._connection)
            except (EOFError, ConnectionResetError) as error:
                raise SimulatorDiedError(self._death()) from error
            yield message
            deadline = time.monotonic() + timeout_s
        raise SimulatorDiedError(f"simulator hung: no sign of life for {timeout_s:.0f} s")

    def _send(self, message: Any) -> None:
        assert self._connection is not None
        try:
            send(self._connection, message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise SimulatorDiedError(self._death()) from error

    def _death(self) -> str:
        assert self._process is not None
        self._process.join(CLOSE_TIMEOUT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"simulator crashed: {signal.Signals(-code).name}"
        return f"simulator ended with exit code {code}"

    def _kill(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def check_spec(spec: RolloutSpec) -> None:
    """Raise DayshiftError if `spec` asks for what does not exist. Light: loads no simulator."""
    check_start(find_task(spec.task), spec.init_state_id, spec.seed)
    Disturbance(spec.fault)
