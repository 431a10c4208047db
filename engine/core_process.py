"""The engine core as a worker behind a socket: in a process of its own, or in a thread.

The loop takes all waiting messages, runs one slice of an action chunk and one engine step, sends what they
brought forth, and sleeps on the socket when there is nothing to compute. The process ends with its parent,
however that ends.
"""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

import msgspec

from dayshift.engine.action_scheduler import ActionScheduler
from dayshift.engine.api import EngineError, SessionFileError
from dayshift.engine.config import EngineConfig
from dayshift.engine.core_link import CoreLink
from dayshift.engine.core_messages import (
    Answer,
    Call,
    Cancel,
    CancelActions,
    Chunks,
    CloseSession,
    CoreInfo,
    Died,
    Drain,
    ForkSession,
    FromCore,
    GetSession,
    GetStats,
    GetTrace,
    ListSessions,
    OpenSession,
    ParkSession,
    PrefetchSession,
    Ready,
    Refusal,
    SetTriggers,
    Shutdown,
    SubmitActions,
    SubmitGenerate,
    SubmitTurn,
    ToCore,
)
from dayshift.engine.held_calls import HeldCalls
from dayshift.engine.models.folder import resolve_model
from dayshift.engine.session_listing import SessionListing
from dayshift.engine.shared_ring import accept_ring
from dayshift.engine.startup import StartupClock, phase
from dayshift.engine.wire import EngineDiedError, error_code
from dayshift.processes import start_without_ctrl_c
from dayshift.types import DayshiftError

if TYPE_CHECKING:
    from dayshift.engine.engine import Engine

logger = logging.getLogger(__name__)

_encoder = msgspec.msgpack.Encoder()

_LAST_MESSAGE_S = 1.0  # for the front to take it

# Tokens of one engine step while robots wait for actions: a long prompt must not make them late.
_MAX_TOKENS_BESIDE_ACTIONS = 256


def start_process(config: EngineConfig, end: socket.socket) -> BaseProcess:
    """Start the core in a new process; it has a copy of `end`, the core's end of its link to the front."""
    process = multiprocessing.get_context("spawn").Process(
        target=_process_main,
        args=(config, end, time.monotonic()),
        name="dayshift-engine",
        daemon=True,
    )
    start_without_ctrl_c(process)
    return process


def start_thread(config: EngineConfig, end: socket.socket) -> threading.Thread:
    """Start the core in a thread of this process, which closes `end` when it ends."""
    thread = threading.Thread(target=_work, args=(config, end), name="dayshift-engine", daemon=True)
    thread.start()
    return thread


def _process_main(config: EngineConfig, end: socket.socket, began_at: float) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "started by start_process"
    _work(config, end, parent.sentinel, began_at)


def _work(
    config: EngineConfig,
    end: socket.socket,
    parent_sentinel: int | None = None,
    began_at: float | None = None,
) -> None:
    clock = StartupClock(began_at or time.monotonic())
    clock.imported()
    channel = _Channel(CoreLink(end, incoming=accept_ring(end)), parent_sentinel)
    try:
        folder = str(resolve_model(config.model))
        with clock.running():
            with phase("import"):
                # torch is loaded here, and not in the front or before a wrong folder is reported.
                from dayshift.engine.engine import Engine

            engine = Engine(replace(config, model=folder))
        try:
            actions = ActionScheduler({source.name: source.load(source.name) for source in config.policies})
            engine.startup = clock.times()
            info = CoreInfo(
                model_folder=folder,
                max_context_tokens=engine.max_context,
                startup=engine.startup,
                policies=actions.infos,
            )
            if parent_sentinel is not None:  # a process of our own
                # What was loaded stays: Python's collector would look through all of it now and then, and
                # every robot and every planner would wait that long.
                gc.freeze()
            channel.send(Ready(info))
            if engine.alarm is not None:
                channel.wake_by(engine.alarm.fileno())
            channel.wake_by(engine.read_alarm)
            channel.wake_by(engine.intake.grammars.alarm)
            serve_requests(engine, actions, channel)
        finally:
            engine.close()
    except EngineDiedError as error:
        channel.send(Died(str(error), is_user_error=False))
    except DayshiftError as error:
        channel.send(Died(str(error), is_user_error=True))
    except Exception as error:
        logger.exception("the engine core failed")
        channel.send(Died(f"engine core failed: {type(error).__name__}", is_user_error=False))
    finally:
        channel.close()


def serve_requests(engine: Engine, actions: ActionScheduler, channel: _Channel) -> None:
    """The core's loop, until it is told to end or its parent is gone."""
    held, listing = HeldCalls(engine.intake), SessionListing(lambda: engine.session_manager.infos())
    while True:
        engine.check()
        is_at_work = engine.can_step or listing.has_work
        for message in channel.receive(wait_s=0.0 if is_at_work else actions.idle_s()):
            match message:
                case Shutdown():
                    return
                case Cancel(request_id):
                    held.drop(request_id)
                    engine.cancel(request_id)
                case CancelActions(call_id):
                    actions.cancel(call_id)
                case SubmitActions():
                    if (refusal := _submit_actions(actions, message)) is not None:
                        channel.send(refusal)
                    if actions.is_awaited and not engine.can_step:
                        break  # what came behind it is read while the device works
                case ListSessions(call_id):
                    listing.ask(call_id)
                case SubmitGenerate() | SubmitTurn() if held.hold(message):
                    pass
                case _:
                    channel.send(_answer(engine, actions, message))
        for call in held.take():
            channel.send(_answer(engine, actions, call))
        for call_id, result in chain(actions.step(), listing.step()):  # each is made when it is sent
            is_error = isinstance(result, EngineError)
            channel.send(_refusal(call_id, result) if is_error else _done(call_id, result))
        if engine.can_step and actions.leaves_time_for_tokens():
            _step(engine, actions, channel)


def _step(engine: Engine, actions: ActionScheduler, channel: _Channel) -> None:
    """One engine step, short enough for the robots that wait."""
    most = engine.max_num_batched_tokens
    engine.scheduler.max_num_batched_tokens = (
        min(most, _MAX_TOKENS_BESIDE_ACTIONS) if actions.has_work else most
    )
    started_at = time.monotonic()
    chunks = engine.step()
    actions.on_engine_step(time.monotonic() - started_at)
    if chunks:
        channel.send(Chunks(chunks))


def _submit_actions(actions: ActionScheduler, call: SubmitActions) -> Refusal | None:
    try:
        actions.submit(call.call_id, call.request)
    except EngineError as error:
        return _refusal(call.call_id, error)
    except Exception:
        logger.exception("an action request could not be read")
        return Refusal(call.call_id, "engine", "internal error, see the server's log")
    return None


def _answer(engine: Engine, actions: ActionScheduler, call: Call) -> Answer | Refusal:
    try:
        return _done(call.call_id, _result(engine, actions, call))
    except EngineError as error:
        return _refusal(call.call_id, error)
    except DayshiftError as error:
        return Refusal(call.call_id, "engine", str(error))
    except Exception:
        logger.exception("a call of the engine failed: %s", type(call).__name__)
        return Refusal(call.call_id, "engine", "internal error, see the server's log")


def _done(call_id: int, result: Any) -> Answer:
    return Answer(call_id, msgspec.Raw(_encoder.encode(result)))


def _refusal(call_id: int, error: EngineError) -> Refusal:
    if isinstance(error, SessionFileError):
        logger.warning("call %d: %s", call_id, error)
    return Refusal(call_id, error_code(error), error.for_client)


def _result(engine: Engine, actions: ActionScheduler, call: Call) -> Any:
    match call:
        case SubmitGenerate(_, request) | SubmitTurn(_, request):
            return engine.submit(request)
        case OpenSession(_, config):
            return engine.open_session(config)
        case GetSession(_, session_id):
            return engine.session(session_id)
        case ForkSession(_, session_id, new_id):
            return engine.fork_session(session_id, new_id)
        case ParkSession(_, session_id):
            engine.park_session(session_id)
            return engine.session(session_id)
        case PrefetchSession(_, session_id):
            return engine.prefetch_session(session_id)
        case CloseSession(_, session_id):
            return engine.close_session(session_id)
        case SetTriggers(_, session_id, triggers):
            engine.set_triggers(session_id, triggers)
            return engine.session(session_id)
        case Drain():
            return engine.drain()
        case GetStats():
            return asdict(engine.stats()) | asdict(actions.stats)
        case GetTrace(_, cursor):
            return engine.trace.since(cursor, time.monotonic())


class _Channel:
    """The core's end of the link, and what else wakes the core."""

    def __init__(self, link: CoreLink, parent_sentinel: int | None) -> None:
        self._link = link
        self._parent_sentinel = parent_sentinel
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
        self._poll = select.poll()
        if parent_sentinel is not None:
            self.wake_by(parent_sentinel)

    def wake_by(self, file: int) -> None:
        """Let `receive` return when this becomes readable, too."""
        self._poll.register(file, select.POLLIN)

    def send(self, message: FromCore) -> None:
        self._link.send(_encoder.encode(message))

    def receive(self, *, wait_s: float | None) -> Iterator[ToCore]:
        """The messages there are, after waiting so long for the first; None: until there is one.

        Those that the caller does not take are the first ones of the next call. Shutdown when the parent has
        ended.
        """
        waits_for = select.POLLIN | (select.POLLOUT if self._link.has_unsent else 0)
        self._poll.register(self._link.fileno(), waits_for)
        has_unread = self._link.has_unread
        wait_s = 0.0 if has_unread else wait_s
        ready = dict(self._poll.poll(None if wait_s is None else math.ceil(1000 * wait_s)))
        if self._parent_sentinel in ready:
            yield Shutdown()
        if has_unread or self._link.fileno() in ready:
            self._link.flush()
            while (message := self._link.receive_one(self._decoder.decode)) is not None:
                yield message
            if self._link.is_closed:
                yield Shutdown()

    def close(self) -> None:
        self._link.close(_LAST_MESSAGE_S)
