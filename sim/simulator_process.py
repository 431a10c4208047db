"""The child's side of `worker.py`: one robot's simulator, serving rollouts over a pipe until it closes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from dayshift.sim.types import Frame, PolicyFactory, RolloutSpec, RolloutStart
from dayshift.types import DayshiftError

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Ready:
    """The simulator has started and waits for a RolloutSpec."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The simulator cannot start, by a mistake that `detail` explains to the user."""

    detail: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The running rollout was ended as asked; the simulator waits for the next one."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Simulator or policy raised an exception, and the process ends; `detail` is one line."""

    detail: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """Parent to child: end the running rollout."""


class _CancelledError(Exception):
    """The parent ended the rollout."""


class _ClosedError(Exception):
    """The parent is gone, or has closed this process's pipe: there is nobody to tell."""


def send(connection: Connection, message: Any) -> None:
    """Send with pickle's protocol 5, which copies arrays once. Both ends are our own processes."""
    connection.send_bytes(pickle.dumps(message, protocol=5))


def receive(connection: Connection) -> Any:
    """Inverse of `send`. Raises EOFError when the other end is gone."""
    return pickle.loads(connection.recv_bytes())


def serve_rollouts(connection: Connection, make_policy: PolicyFactory) -> None:
    """Main function of a robot's process. Sends Ready, then serves one RolloutSpec after the other.

    For each it sends a RolloutStart, the Frames and a RolloutResult or Cancelled. After an exception the
    process sends Broken and ends, because nothing is known of its state: the parent starts a new one.
    """
    _die_with_parent()
    with contextlib.suppress(_ClosedError):
        _serve(connection, make_policy)


def _serve(connection: Connection, make_policy: PolicyFactory) -> None:
    try:
        from dayshift.sim.warm import ENV

        if ENV is None:
            from dayshift.sim.libero_env import LiberoEnv

            env = LiberoEnv()
        else:
            env = ENV
        policy = make_policy(env)
    except DayshiftError as error:
        _tell(connection, Refused(str(error)))
        return
    _tell(connection, Ready())

    from dayshift.sim.rollout import rollout

    def on_start(spec: RolloutSpec, start: RolloutStart) -> None:
        _tell(connection, start)

    def on_frame(frame: Frame) -> None:
        _tell(connection, frame)
        if connection.poll() and isinstance(_hear(connection), Cancel):
            raise _CancelledError

    while True:
        spec = _hear(connection)
        if isinstance(spec, Cancel):  # it crossed the result on its way
            continue
        try:
            _tell(connection, rollout(env, policy, spec, on_start, on_frame))
        except _CancelledError:
            _tell(connection, Cancelled())
        except Exception as error:  # noqa: BLE001 (reported, and this process ends)
            _tell(connection, Broken(f"{type(error).__name__}: {_first_line(error)}"))
            return


def _tell(connection: Connection, message: Any) -> None:
    """Send to the parent. Raises _ClosedError."""
    try:
        send(connection, message)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _ClosedError from error


def _hear(connection: Connection) -> Any:
    """The parent's next message. Raises _ClosedError."""
    try:
        return receive(connection)
    except (EOFError, ConnectionResetError) as error:  # reset: it has not read all that we sent
        raise _ClosedError from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _die_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        os._exit(1)
