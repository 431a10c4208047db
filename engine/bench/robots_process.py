"""The clients of `dayshift bench robots` in a process of their own, so that they and the server do not wait
for each other's interpreter."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from dayshift.engine.bench.robots import RobotsLoad, RobotsRow
from dayshift.engine.bench.robots_client import run_fleet
from dayshift.processes import start_without_ctrl_c
from dayshift.types import DayshiftError


def measure_robots(
    url: str, load: RobotsLoad, numbers: Sequence[int], peer_model: str | None = None
) -> Iterator[RobotsRow | str]:
    """A row for each number of robots, in ascending order, and lines that say what is going on.

    Robots stay, and more join them. `peer_model` None: the server is Dayshift's, and keeps sessions.
    Raises DayshiftError when the server cannot be reached.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    arguments = (url, load, sorted(numbers), peer_model, sender)
    process = context.Process(target=_run_clients, args=arguments, name="dayshift-robots", daemon=True)
    start_without_ctrl_c(process)
    sender.close()
    try:
        yield from _received(receiver)
    finally:
        process.terminate()
        process.join()


def _received(receiver: Connection) -> Iterator[RobotsRow | str]:
    while True:
        try:
            item = receiver.recv()
        except EOFError as error:
            raise DayshiftError("bench robots: the clients' process ended") from error
        if item is None:
            return
        if isinstance(item, DayshiftError):
            raise item
        yield item


def _run_clients(
    url: str, load: RobotsLoad, numbers: list[int], peer_model: str | None, sender: Connection
) -> None:
    try:
        run_fleet(url, load, numbers, peer_model, sender.send)
        sender.send(None)
    except DayshiftError as error:
        sender.send(error)
