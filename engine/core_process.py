"""The engine core as a worker behind a message socket: in a process of its own, or in a thread.

The loop takes all waiting messages, does one engine step, sends what it brought forth, and sleeps
on the socket when there is nothing to compute. The process ends with its parent, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from dayshift.engine.api import EngineError
from dayshift.engine.config import EngineConfig
from dayshift.engine.core_messages import (
    Answer,
    Call,
    Cancel,
    Chunks,
    CloseSession,
    CoreInfo,
    Died,
    Drain,
    ForkSession,
    FromCore,
    GetSession,
    GetStats,
    ListSessions,
    OpenSession,
    ParkSession,
    Ready,
    Refusal,
    SetTriggers,
    Shutdown,
    SubmitGenerate,
    SubmitTurn,
    ToCore,
)
from dayshift.engine.models.folder import resolve_model
from dayshift.engine.wire import error_code
from dayshift.types import DayshiftError

if TYPE_CHECKING:
    from dayshift.engine.engine import Engine

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()


def start_process(config: EngineConfig, address: str) -> BaseProcess:
    """Start the core in a new process that connects to `address`."""
    process = multiprocessing.get_context("spawn").Process(
        target=_process_main, args=(config, address), name="dayshift-engine", daemon=True
    )
    # The child inherits the mask: a Ctrl-C that comes before it ignores the signal ends nothing in it.
    # The resource tracker has to run by then, since starting it unblocks the signal again.
    resource_tracker.ensure_running()
    unmasked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unmasked)
    return process


def start_thread(config: EngineConfig, address: str, context: zmq.Context) -> threading.Thread:
    """Start the core in a thread of this process; `address` is inproc in `context`."""
    thread = threading.Thread(
        target=_work, args=(config, address, context), name="dayshift-engine", daemon=True
    )
    thread.start()
    return thread


def _process_main(config: EngineConfig, address: str) -> None:
    # Ctrl-C reaches the whole group of processes; the parent decides when the core ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by start_process"
    with zmq.Context() as context:
        _work(config, address, context, parent.sentinel)


def _work(
    config: EngineConfig, address: str, context: zmq.Context, parent_sentinel: int | None = None
) -> None:
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.connect(address)
    channel = _Channel(socket, parent_sentinel)
    try:
        folder = str(resolve_model(config.model))
        # torch is loaded here, and not in the front or before a wrong folder is reported.
        from dayshift.engine.engine import Engine

        engine = Engine(replace(config, model=folder))
        try:
            channel.send(Ready(CoreInfo(model_folder=folder, max_context_tokens=engine.max_context)))
            serve_requests(engine, channel)
        finally:
            engine.close()
    except DayshiftError as error:
        channel.send(Died(str(error), is_user_error=True))
    except Exception as error:
        logger.exception("the engine core failed")
        channel.send(Died(f"engine core failed: {type(error).__name__}", is_user_error=False))
    finally:
        socket.close(linger=1000)  # ms, for the last message


def serve_requests(engine: Engine, channel: _Channel) -> None:
    """The core's loop, until it is told to end or its parent is gone."""
    while True:
        for message in channel.receive(wait=not engine.has_work):
            match message:
                case Shutdown():
                    return
                case Cancel(request_id):
                    engine.cancel(request_id)
                case _:
                    channel.send(_answer(engine, message))
        if engine.has_work and (chunks := engine.step()):
            channel.send(Chunks(chunks))


def _answer(engine: Engine, call: Call) -> Answer | Refusal:
    try:
        return Answer(call.call_id, msgspec.Raw(_encoder.encode(_result(engine, call))))
    except EngineError as error:
        return Refusal(call.call_id, error_code(error), str(error))
    except DayshiftError as error:
        return Refusal(call.call_id, "engine", str(error))
    except Exception:
        logger.exception("a call of the engine failed: %s", type(call).__name__)
        return Refusal(call.call_id, "engine", "internal error, see the server's log")


def _result(engine: Engine, call: Call) -> Any:
    match call:
        case SubmitGenerate(_, request) | SubmitTurn(_, request):
            return engine.submit(request)
        case OpenSession(_, config):
            return engine.open_session(config)
        case GetSession(_, session_id):
            return engine.session(session_id)
        case ListSessions():
            return engine.sessions()
        case ForkSession(_, session_id, new_id):
            return engine.fork_session(session_id, new_id)
        case ParkSession(_, session_id):
            engine.park_session(session_id)
            return engine.session(session_id)
        case CloseSession(_, session_id):
            return engine.close_session(session_id)
        case SetTriggers(_, session_id, triggers):
            engine.set_triggers(session_id, triggers)
            return engine.session(session_id)
        case Drain():
            return engine.drain()
        case GetStats():
            return engine.stats()


class _Channel:
    """The core's end of the socket."""

    def __init__(self, socket: zmq.Socket, parent_sentinel: int | None) -> None:
        self._socket = socket
        self._parent_sentinel = parent_sentinel
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        if parent_sentinel is not None:
            self._poller.register(parent_sentinel, zmq.POLLIN)

    def send(self, message: FromCore) -> None:
        self._socket.send(_encoder.encode(message))

    def receive(self, *, wait: bool) -> Iterator[ToCore]:
        """All messages there are; with `wait`, at least one. Shutdown when the parent has ended."""
        ready = dict(self._poller.poll(None if wait else 0))
        if self._parent_sentinel in ready:
            yield Shutdown()
        while self._socket.poll(0):
            yield self._decoder.decode(self._socket.recv())
