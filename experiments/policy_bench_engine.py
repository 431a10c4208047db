"""An engine's core without HTTP in front of it, for benchmarks: calls go straight to its process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from threading import Thread

import uvloop

from dayshift.engine.action_api import ActionBody, ActionChunk, ActionRequest, PolicyInfo
from dayshift.engine.api import GenerateChunk, SessionConfig, SessionInfo, TurnRequest
from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.config import EngineConfig
from dayshift.experiments.policy_bench import BenchTarget


class EngineClient:
    """The calls of `DayshiftClient` that the benchmark makes, for an engine in `loop`; from any thread."""

    def __init__(self, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def policies(self) -> Sequence[PolicyInfo]:
        return self._engine.info.policies

    def act(self, policy: str, body: ActionBody) -> ActionChunk:
        return self._wait_for(self._engine.act(_request(policy, body)))

    def ask(self, policy: str, bodies: Sequence[ActionBody]) -> Sequence[tuple[ActionChunk, float]]:
        """As a fleet: the engine's loop is the robots' too, where threads would wait for each other."""

        async def ask_one(body: ActionBody, started_at: float) -> tuple[ActionChunk, float]:
            chunk = await self._engine.act(_request(policy, body))
            return chunk, time.monotonic() - started_at

        async def ask_all() -> list[tuple[ActionChunk, float]]:
            started_at = time.monotonic()
            return await asyncio.gather(*(ask_one(body, started_at) for body in bodies))

        return self._wait_for(ask_all())

    def open_session(self, config: SessionConfig) -> SessionInfo:
        return self._wait_for(self._engine.open_session(config))

    def close_session(self, session_id: str) -> None:
        self._wait_for(self._engine.close_session(session_id))

    def stream_turn(self, request: TurnRequest) -> Generator[GenerateChunk]:
        """Closing the generator before its end cancels the turn."""
        chunks: SimpleQueue[GenerateChunk | None] = SimpleQueue()

        async def pump() -> None:
            try:
                async with await self._engine.submit(request) as stream:
                    async for chunk in stream:
                        chunks.put(chunk)
            finally:
                chunks.put(None)

        pumping = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
        except GeneratorExit:
            pumping.cancel()
            while chunks.get() is not None:  # until the engine has been told
                pass
            raise
        pumping.result()

    def _wait_for[T](self, call: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


def _request(policy: str, body: ActionBody) -> ActionRequest:
    deadline = None if body.deadline_ms is None else time.monotonic() + body.deadline_ms / 1000
    return ActionRequest(
        policy=policy,
        images=body.images,
        state=body.state,
        instruction=body.instruction,
        deadline=deadline,
        seed=body.seed,
        running=body.running,
    )


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[BenchTarget]:
    """An engine in a process of its own while the context lasts.

    Raises DayshiftError when the configuration is wrong, EngineDiedError when the core fails.
    """
    loop = uvloop.new_event_loop()
    thread = Thread(target=loop.run_forever, name="dayshift-bench", daemon=True)
    thread.start()
    try:
        engine = asyncio.run_coroutine_threadsafe(AsyncEngine.start(config), loop).result()

        client = EngineClient(engine, loop)
        try:
            yield BenchTarget(lambda: nullcontext(client), lambda num_robots: nullcontext(client))
        finally:
            asyncio.run_coroutine_threadsafe(engine.close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
