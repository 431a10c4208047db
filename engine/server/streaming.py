"""Running generations for HTTP clients that may go away at any moment."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from dayshift.engine.api import (
    EngineError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InvalidRequestError,
    TokenLedger,
    TurnRequest,
)
from dayshift.engine.async_engine import ChunkStream
from dayshift.engine.server.errors import ParameterError, error_body
from dayshift.engine.server.state import ServerState
from dayshift.engine.wire import RequestTimeoutError, failure_of

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class ClientGoneError(EngineError):
    """The client closed the connection; the response has no reader."""

    status = 499


async def submit(
    state: ServerState,
    request: Request,
    requests: Iterable[GenerateRequest | TurnRequest],
    *,
    schema_field: str | None = None,
) -> ChunkStream:
    """Hand requests to the engine. Raises its refusal before any byte of a response is sent.

    `schema_field` is the field of the body that schemas came from, for refusals of these.
    """
    requests = list(requests)
    _check_size(requests, state.limits.max_request_tokens)
    submitting = state.engine.submit(*requests, max_unread=state.limits.max_unread_chunks)
    try:
        return await while_connected(request, submitting)
    except InvalidRequestError as error:
        renamed = _in_words_of(schema_field, error)
        if renamed is error:
            raise
        raise renamed from error


def _in_words_of(schema_field: str | None, error: EngineError) -> EngineError:
    """The refusal of a schema, or the error itself, as the client calls what it sent."""
    name, _, reason = str(error).partition(": ")
    is_of_schema = isinstance(error, InvalidRequestError) and name in ("grammar", "json_schema")
    return error if schema_field is None or not is_of_schema else ParameterError(schema_field, reason)


def _check_size(requests: list[GenerateRequest | TurnRequest], most: int | None) -> None:
    if most is None:
        return
    total = sum(_num_prompt_tokens(request) + request.sampling.max_tokens for request in requests)
    if total > most:
        raise InvalidRequestError(
            f"prompt and max_tokens of all choices come to {total} tokens; "
            f"this server takes {most} in a request"
        )


def _num_prompt_tokens(request: GenerateRequest | TurnRequest) -> int:
    is_turn = isinstance(request, TurnRequest)
    return len(request.token_ids if is_turn else request.prompt_token_ids)


async def observed(
    state: ServerState,
    stream: ChunkStream,
    *,
    label: str,
    user: str | None = None,
    schema_field: str | None = None,
) -> AsyncGenerator[GenerateChunk]:
    """The stream's chunks, with metrics and one log line for each request. `schema_field` as in `submit`.

    Raises EngineError when a generation ends with an error, RequestTimeoutError when it takes too long.
    """
    started = time.monotonic()
    answered: set[str] = set()
    timeout_s = state.limits.request_timeout_s
    async for chunk in stream if timeout_s is None else _in_time(stream, timeout_s):
        seconds = time.monotonic() - started
        if chunk.token_ids and chunk.request_id not in answered:
            answered.add(chunk.request_id)
            state.metrics.observe_first_token(seconds)
        if chunk.finish_reason is not None:
            ledger = chunk.ledger or TokenLedger()
            state.metrics.observe_end(chunk.finish_reason, seconds, ledger)
            logger.info(
                "%s %s: %d prompt tokens (%d computed, %d recalled), %d generated, %s after %.0f ms%s",
                label,
                chunk.request_id,
                chunk.num_prompt_tokens,
                ledger.computed + ledger.recomputed,
                ledger.recalled,
                ledger.generated,
                chunk.finish_reason,
                seconds * 1000,
                f", user {user!r}" if user else "",
            )
        if chunk.finish_reason is FinishReason.ERROR:
            raise _in_words_of(schema_field, failure_of(chunk))
        yield chunk


async def _in_time(stream: ChunkStream, timeout_s: float) -> AsyncGenerator[GenerateChunk]:
    """The stream's chunks, as long as they come in time."""
    end = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            async with asyncio.timeout_at(end):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the call took longer than {timeout_s:g} s and was cancelled"
            ) from None
        if chunk is None:
            return
        yield chunk


async def collect(
    request: Request, stream: ChunkStream, chunks: AsyncIterator[GenerateChunk]
) -> list[GenerateChunk]:
    """All `chunks`, which come from `stream`; that is cancelled when the client goes away first."""

    async def read_all() -> list[GenerateChunk]:
        return [chunk async for chunk in chunks]

    async with stream:
        return await while_connected(request, read_all())


async def while_connected[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which begins at once and is cancelled when the client closes the connection."""
    task = asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)
    watcher = asyncio.create_task(_until_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed the connection")
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _until_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """One server-sent event that is named after its `type`."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


class EventStream(StreamingResponse):
    """Server-sent events that are made of the chunks of `stream`.

    An error becomes the last event. However the response ends, `stream` is cancelled if unfinished.
    """

    media_type = "text/event-stream"

    def __init__(self, stream: ChunkStream, events: AsyncIterator[bytes]) -> None:
        self._stream = stream
        super().__init__(_with_errors(events), headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stream:
            await super().__call__(scope, receive, send)


async def _with_errors(events: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    try:
        async for item in events:
            yield item
    except EngineError as error:
        yield event(error_body(error))
