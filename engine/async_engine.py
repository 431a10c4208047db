"""The engine as asyncio code uses it: requests go to the core, chunks come back as streams."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterable
from itertools import count
from multiprocessing.process import BaseProcess
from typing import Any, Self

import msgspec

from dayshift.engine import core_messages as msg
from dayshift.engine import core_process
from dayshift.engine.action_api import ActionChunk, ActionRequest
from dayshift.engine.api import (
    EngineError,
    GenerateChunk,
    GenerateRequest,
    OnMatch,
    RequestIdInUseError,
    SessionConfig,
    SessionInfo,
    TurnRequest,
)
from dayshift.engine.config import EngineConfig
from dayshift.engine.core_link import CoreLink
from dayshift.engine.shared_ring import offer_ring
from dayshift.engine.trace import EngineTrace
from dayshift.engine.wire import EngineDiedError, SlowReaderError, error_from_code
from dayshift.types import DayshiftError

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 10.0
# A dying core's own last words may still be on the way when its process has ended.
_LAST_WORDS_S = 0.2


class ChunkStream:
    """The chunks of one or several requests as they are generated; `request_id` tells them apart.

    An async iterator that ends with the last chunk of the last request, and an async context
    manager that cancels what is unfinished when it is left. Raises EngineDiedError when the core
    ends in between. A reader that falls more than `max_unread` chunks behind gets those, and then
    SlowReaderError; what is unfinished is cancelled at once.
    """

    def __init__(
        self, engine: AsyncEngine, request_ids: Iterable[str], *, max_unread: int | None = None
    ) -> None:
        self._engine = engine
        self._unfinished = set(request_ids)
        self._max_unread = max_unread
        self._is_abandoned = False
        self._queue: asyncio.Queue[GenerateChunk | EngineError] = asyncio.Queue()

    def put(self, item: GenerateChunk | EngineError) -> None:
        """Called by the engine."""
        if self._is_abandoned:
            return
        if self._max_unread is not None and self._queue.qsize() >= self._max_unread:
            self._is_abandoned = True
            item = SlowReaderError(
                f"the stream was read too slowly: {self._max_unread} pieces wait, the rest was cancelled"
            )
            self._engine.cancel_soon(self._unfinished)
        self._queue.put_nowait(item)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> GenerateChunk:
        if not self._unfinished:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, EngineError):
            self._unfinished.clear()
            raise item
        if item.finish_reason is not None:
            self._unfinished.discard(item.request_id)
        return item

    async def aclose(self) -> None:
        """Cancel what is unfinished."""
        while self._unfinished:
            await self._engine.cancel(self._unfinished.pop())


class AsyncEngine:
    """An engine core in a process (or thread) of its own. Made by `start`; ended by `close`."""

    info: msg.CoreInfo
    """The loaded model."""

    def __init__(
        self,
        worker: BaseProcess | threading.Thread,
        link: CoreLink,
    ) -> None:
        self.failure: str | None = None
        """Why the core ended, in one line; None while it works."""
        self.is_draining = False
        """The engine gives its sessions away and takes no more work."""
        self._worker = worker
        self._link = link
        self._decoder = msgspec.msgpack.Decoder(msg.FromCore)
        self._call_ids = count()
        self._answers: dict[int, asyncio.Future[msgspec.Raw]] = {}
        self._streams: dict[str, ChunkStream] = {}
        self._cancelling: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._ready: asyncio.Future[msg.CoreInfo] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(link.fileno(), self._read_messages)

    @classmethod
    async def start(cls, config: EngineConfig, *, in_process: bool = False) -> Self:
        """Load the model, in a new process or (`in_process`) in a thread, and return when it serves.

        Raises DayshiftError when the configuration is wrong, EngineDiedError when the core fails.
        """
        ours, its = socket.socketpair()
        link = CoreLink(ours, outgoing=offer_ring(ours))
        if in_process:
            engine = cls(core_process.start_thread(config, its), link)
        else:
            with its:  # the process has a copy
                process = core_process.start_process(config, its)
            engine = cls(process, link)
            asyncio.get_running_loop().add_reader(process.sentinel, engine._on_process_end, process)
        await engine._wait_until_ready()
        return engine

    async def _wait_until_ready(self) -> None:
        try:
            self.info = await self._ready
        except BaseException:
            await self.close()
            raise

    async def submit(
        self, *requests: GenerateRequest | TurnRequest, max_unread: int | None = None
    ) -> ChunkStream:
        """Start requests that belong together; their chunks come in one stream.

        `max_unread`: see ChunkStream.

        Raises the engine's EngineError when it refuses one of them; the others are then cancelled.
        """
        if used := [request.request_id for request in requests if request.request_id in self._streams]:
            raise RequestIdInUseError(f"request id {used[0]} is in use")
        stream = ChunkStream(self, [request.request_id for request in requests], max_unread=max_unread)
        try:
            for request in requests:
                self._streams[request.request_id] = stream
                await self._submit(request)
        except (EngineError, asyncio.CancelledError):
            await stream.aclose()
            raise
        return stream

    async def _submit(self, request: GenerateRequest | TurnRequest) -> None:
        call_id = next(self._call_ids)
        match request:
            case TurnRequest():
                await self._call(msg.SubmitTurn(call_id, request), None)
            case GenerateRequest():
                await self._call(msg.SubmitGenerate(call_id, request), None)

    async def cancel(self, request_id: str) -> None:
        """Stop a request if it is running. A session's turn is rolled back."""
        if self._streams.pop(request_id, None) is not None and self.failure is None:
            self._send(msg.Cancel(request_id))

    async def act(self, request: ActionRequest) -> ActionChunk:
        """Compute an action chunk. Raises PolicyNotFoundError, InvalidRequestError, DeadlineExceededError."""
        call = msg.SubmitActions(next(self._call_ids), request)
        try:
            return await self._call(call, ActionChunk)
        except asyncio.CancelledError:
            if self.failure is None:
                self._send(msg.CancelActions(call.call_id))
            raise

    def cancel_soon(self, request_ids: Iterable[str]) -> None:
        """Stop requests whose streams cannot wait for it."""
        for request_id in list(request_ids):
            task = asyncio.create_task(self.cancel(request_id))
            self._cancelling.add(task)
            task.add_done_callback(self._cancelling.discard)

    def end_calls(self, error: EngineError) -> None:
        """End every call that is under way with this error; the turns of sessions are rolled back."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        for stream in self._streams.values():
            stream.put(error)
        self.cancel_soon(self._streams)

    async def open_session(self, config: SessionConfig) -> SessionInfo:
        return await self._call(msg.OpenSession(next(self._call_ids), config), SessionInfo)

    async def session(self, session_id: str) -> SessionInfo:
        return await self._call(msg.GetSession(next(self._call_ids), session_id), SessionInfo)

    async def sessions(self) -> list[SessionInfo]:
        return await self._call(msg.ListSessions(next(self._call_ids)), list[SessionInfo])

    async def fork_session(self, session_id: str, new_id: str | None = None) -> SessionInfo:
        return await self._call(msg.ForkSession(next(self._call_ids), session_id, new_id), SessionInfo)

    async def park_session(self, session_id: str) -> SessionInfo:
        return await self._call(msg.ParkSession(next(self._call_ids), session_id), SessionInfo)

    async def prefetch_session(self, session_id: str) -> SessionInfo:
        return await self._call(msg.PrefetchSession(next(self._call_ids), session_id), SessionInfo)

    async def close_session(self, session_id: str) -> None:
        await self._call(msg.CloseSession(next(self._call_ids), session_id), None)

    async def set_triggers(self, session_id: str, triggers: tuple[OnMatch, ...]) -> SessionInfo:
        return await self._call(msg.SetTriggers(next(self._call_ids), session_id, triggers), SessionInfo)

    async def drain(self) -> None:
        """Release every session for other engines, and take no more work. Returns before it is done."""
        await self._call(msg.Drain(next(self._call_ids)), None)
        self.is_draining = True

    async def stats(self) -> dict[str, Any]:
        """The engine's EngineStats as a dict, for metrics."""
        return await self._call(msg.GetStats(next(self._call_ids)), dict[str, Any])

    async def trace(self, cursor: str) -> EngineTrace:
        """What happened to requests since `cursor` ("": all that is kept)."""
        return await self._call(msg.GetTrace(next(self._call_ids), cursor), EngineTrace)

    async def close(self) -> None:
        """End the core and wait for it. Running requests end with EngineDiedError."""
        if self._is_closing:
            return
        self._is_closing = True
        await self._end_worker()
        self._fail(EngineDiedError("the engine was shut down"))
        asyncio.get_running_loop().remove_reader(self._link.fileno())
        asyncio.get_running_loop().remove_writer(self._link.fileno())
        self._link.close()

    async def _end_worker(self) -> None:
        process = self._worker if isinstance(self._worker, BaseProcess) else None
        if process is not None:
            asyncio.get_running_loop().remove_reader(process.sentinel)
        if process is not None and not self._has_started:  # it would finish loading before it listens
            process.kill()
        elif self._worker.is_alive() and self.failure is None:  # else it ends by itself
            self._send(msg.Shutdown())
        await asyncio.to_thread(self._worker.join, _CLOSE_TIMEOUT_S)
        if process is not None and process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join)

    async def _call(self, call: msg.Call, result_type: Any) -> Any:
        if self.failure is not None:
            raise EngineDiedError(self.failure)
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._answers[call.call_id] = answer
        try:
            self._send(call)
            return msgspec.msgpack.decode(await answer, type=result_type)
        finally:
            self._answers.pop(call.call_id, None)

    def _send(self, message: msg.ToCore) -> None:
        self._link.send(msgspec.msgpack.encode(message))
        if self._link.has_unsent:
            asyncio.get_running_loop().add_writer(self._link.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        """The core reads again: it gets what it did not take before."""
        self._link.flush()
        if not self._link.has_unsent:
            asyncio.get_running_loop().remove_writer(self._link.fileno())

    def _read_messages(self) -> None:
        """There are messages from the core, or it has ended."""
        for message in self._link.receive():
            match self._decoder.decode(message):
                case msg.Ready(info):
                    if not self._ready.done():  # else nobody waits any more
                        self._ready.set_result(info)
                case msg.Answer(call_id, result):
                    if (answer := self._waiting_answer(call_id)) is not None:
                        answer.set_result(result)
                case msg.Refusal(call_id, code, text):
                    if (answer := self._waiting_answer(call_id)) is not None:
                        answer.set_exception(error_from_code(code, text))
                case msg.Chunks(chunks):
                    for chunk in chunks:
                        self._deliver(chunk)
                case msg.Died(text, is_user_error):
                    self._fail(DayshiftError(text) if is_user_error else EngineDiedError(text))
        if self._link.is_closed:
            asyncio.get_running_loop().remove_reader(self._link.fileno())

    def _waiting_answer(self, call_id: int) -> asyncio.Future[msgspec.Raw] | None:
        """Where an answer goes; None if the caller was cancelled meanwhile."""
        answer = self._answers.get(call_id)
        return None if answer is None or answer.done() else answer

    def _deliver(self, chunk: GenerateChunk) -> None:
        stream = self._streams.get(chunk.request_id)
        if stream is None:  # cancelled in the meantime
            return
        stream.put(chunk)
        if chunk.finish_reason is not None:
            del self._streams[chunk.request_id]

    @property
    def _has_started(self) -> bool:
        return self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None

    def _on_process_end(self, process: BaseProcess) -> None:
        """The pipe to the core has closed: its process has ended, or is about to."""

        def report() -> None:
            self._fail(EngineDiedError(f"the engine's process ended (exit code {process.exitcode})"))

        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        loop.call_later(_LAST_WORDS_S, report)

    def _fail(self, error: DayshiftError) -> None:
        """The core has ended: everything that waits for it gets the reason. Later reasons are ignored."""
        if self.failure is not None:
            return
        self.failure = str(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        elif not self._is_closing:
            logger.error("%s", self.failure)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineDiedError(self.failure))
        for stream in self._streams.values():
            stream.put(EngineDiedError(self.failure))
        self._streams.clear()
