"""Data parallel: several engines of one configuration on one host, behind the address of one.

Each is a whole server of its own, with its own core, GPUs and tokenizer, on a loopback port that the
system chooses; the router in front places sessions as it does for any engines.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from dayshift.engine.config import EngineConfig
from dayshift.engine.router.fleet import Fleet
from dayshift.engine.router.run import RouterOptions, listen_for, route
from dayshift.engine.server.run import ServerOptions, serve_until_signal
from dayshift.engine.server.serving import run_until_signal
from dayshift.processes import start_without_ctrl_c
from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 20.0  # of a server that parks its sessions


def serve_replicas(
    config: EngineConfig,
    options: ServerOptions,
    num_replicas: int,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve with `num_replicas` engines until SIGINT or SIGTERM.

    Engine i has the CUDA devices after those of engine i - 1, `config.tensor_parallel` of them. Limits of
    `options` hold for each engine. `on_ready` is given the one URL once all answer.

    Raises DayshiftError when the address cannot be used or an engine cannot start.
    """
    front = RouterOptions(
        host=options.host,
        port=options.port,
        api_key=options.api_key,
        more_api_keys=options.more_api_keys,
    )
    with listen_for(front) as listener, running_replicas(config, options, num_replicas) as urls:
        fleet = Fleet(urls)
        run_until_signal(
            lambda on_ready: route(fleet, front, listener, on_ready), on_ready or (lambda _: None)
        )


@contextmanager
def running_replicas(
    config: EngineConfig, options: ServerOptions, num_replicas: int
) -> Iterator[tuple[str, ...]]:
    """The engines in processes of their own while the context lasts; yields their URLs.

    Raises DayshiftError when one cannot start; the others are ended.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    receivers: list[Connection] = []
    try:
        for index in range(num_replicas):
            receiver, sender = context.Pipe(duplex=False)
            receivers.append(receiver)
            arguments = (replica_config(config, index), replace(options, host="127.0.0.1", port=0), sender)
            # Not a daemon: it has a child of its own, the engine's core.
            process = context.Process(target=_serve_replica, args=arguments, name=f"dayshift-server-{index}")
            start_without_ctrl_c(process)
            processes.append(process)
            sender.close()
        urls = tuple(_url_from(receiver, index) for index, receiver in enumerate(receivers))
        for index, (url, process) in enumerate(zip(urls, processes, strict=True)):
            logger.info("engine %d is at %s (process %d)", index, url, process.pid)
        yield urls
    finally:
        _end(processes)


def replica_config(config: EngineConfig, index: int) -> EngineConfig:
    """The configuration of engine `index`: it has the CUDA devices after those of the ones before it."""
    return replace(config, first_gpu=config.first_gpu + index * config.tensor_parallel)


def _url_from(receiver: Connection, index: int) -> str:
    try:
        url = receiver.recv()
    except EOFError as error:
        raise DayshiftError(f"engine {index} ended while it started, see the log") from error
    if isinstance(url, DayshiftError):
        raise DayshiftError(f"engine {index}: {url}") from url
    return url


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_END_TIMEOUT_S)
        if process.is_alive():
            logger.error("process %d did not end within %.0f s and is killed", process.pid, _END_TIMEOUT_S)
            process.kill()
            process.join()


def _serve_replica(config: EngineConfig, options: ServerOptions, sender: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve_until_signal(config, options, sender.send)
    except DayshiftError as error:
        sender.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by running_replicas"
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
