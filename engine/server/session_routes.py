"""The session API. Replies are the border types of `engine.api` as JSON, field names unchanged."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from dayshift.engine.api import GenerateChunk
from dayshift.engine.server.body_route import BodyRoute
from dayshift.engine.server.session_fields import ForkBody, OpenSessionBody, TriggersBody, TurnBody
from dayshift.engine.server.state import State
from dayshift.engine.server.streaming import DONE, EventStream, collect, event, observed, submit
from dayshift.engine.wire import collect_chunks

router = APIRouter(prefix="/v1/sessions", route_class=BodyRoute)


@router.post("")
async def open_session(body: OpenSessionBody, state: State) -> Response:
    """Create a session."""
    return _json(await state.engine.open_session(body.to_config()), status=201)


@router.get("")
async def list_sessions(state: State) -> Response:
    """All sessions, parked ones included."""
    return _json({"sessions": await state.engine.sessions()})


@router.get("/{session_id}")
async def get_session(session_id: str, state: State) -> Response:
    """A session with the state of each of its turns."""
    return _json(await state.engine.session(session_id))


@router.post("/{session_id}/turns")
async def take_turn(session_id: str, body: TurnBody, request: Request, state: State) -> Response:
    """Append a turn and generate its reply."""
    turn = body.to_request(session_id, default_id=f"turn-{uuid.uuid4().hex}")
    stream = await submit(state, request, [turn])
    chunks = observed(state, stream, label=f"turn of {session_id}")
    if body.stream:
        return EventStream(stream, _events(chunks))
    return _json(collect_chunks(await collect(request, stream, chunks)))


@router.put("/{session_id}/triggers")
async def set_triggers(session_id: str, body: TriggersBody, state: State) -> Response:
    """Replace the session's recall triggers."""
    triggers = tuple(trigger.to_on_match() for trigger in body.triggers)
    return _json(await state.engine.set_triggers(session_id, triggers))


@router.post("/{session_id}/fork")
async def fork_session(session_id: str, state: State, body: ForkBody | None = None) -> Response:
    """A new session with the same past."""
    new_id = None if body is None else body.session_id
    return _json(await state.engine.fork_session(session_id, new_id), status=201)


@router.post("/{session_id}/park")
async def park_session(session_id: str, state: State) -> Response:
    """Give the session's KV blocks back; its next call restores it."""
    return _json(await state.engine.park_session(session_id))


@router.post("/{session_id}/prefetch")
async def prefetch_session(session_id: str, state: State) -> Response:
    """A hint that the session will be called soon: restores it if that takes no blocks from others."""
    return _json(await state.engine.prefetch_session(session_id))


@router.delete("/{session_id}")
async def close_session(session_id: str, state: State) -> Response:
    """Delete a session and its records; a call in flight is cancelled."""
    await state.engine.close_session(session_id)
    return Response(status_code=204)


async def _events(chunks: AsyncIterator[GenerateChunk]) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield event(chunk)
    yield DONE


def _json(body: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
