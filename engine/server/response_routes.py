"""/v1/responses and /v1/conversations: OpenAI's stateful API on top of the engine's sessions.

A stored response ends a session, if its conversation can be one: its chat template lets turns be
appended, and describes tools in the system prompt. The next call that goes on from there sends the session
its new turn only. Every other call (from an older response, with other instructions or tools) renders its
whole past from the store; the past then begins a session of its own where that is possible.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from dayshift.engine.api import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    Message,
    SessionConfig,
    SessionInfo,
    SessionLockedError,
    SessionNotFoundError,
    TurnRequest,
)
from dayshift.engine.server.body_route import BodyRoute
from dayshift.engine.server.chat_fields import DEFAULT_CHAT_TOKENS
from dayshift.engine.server.chat_prompt import ChatPrompt, chat_prompt, turn_prompt
from dayshift.engine.server.choices import ReplyReader
from dayshift.engine.server.errors import ObjectNotFoundError, ParameterError
from dayshift.engine.server.openai_fields import num_cached_tokens, total_ledger
from dayshift.engine.server.response_fields import (
    ConversationRequest,
    ResponseRequest,
    ResponseTool,
    to_messages,
)
from dayshift.engine.server.response_output import Output, StreamEvent, new_id
from dayshift.engine.server.response_store import Conversation, StoredResponse, now
from dayshift.engine.server.state import ServerState, State
from dayshift.engine.server.streaming import EventStream, collect, named_event, observed, submit
from dayshift.engine.server.tool_results import check_input, check_outputs, open_calls

router = APIRouter(prefix="/v1", route_class=BodyRoute)


@router.post("/responses")
async def create_response(body: ResponseRequest, request: Request, state: State) -> Response:
    """Generate a response to new input, after what came before it."""
    state.check_model(body.model)
    reply = _Reply(state, body, await _prepare(state, body))
    with reply.forgotten_on_error():
        schema_field = "tools" if reply.call.prompt.rules.callable_tools else "text.format"
        stream = await submit(state, request, [reply.call.request], schema_field=schema_field)
        chunks = observed(state, stream, label="/v1/responses", user=body.end_user, schema_field=schema_field)
        if body.stream:
            return EventStream(stream, reply.stream(chunks))
        for chunk in await collect(request, stream, chunks):
            reply.add(chunk)
        return JSONResponse(await reply.finish())


@router.get("/responses/{response_id}")
async def get_response(response_id: str, request: Request, state: State) -> Response:
    """A stored response, whole: it is not streamed again, and there is nothing to include."""
    for name, value in request.query_params.items():
        if (name, value) != ("stream", "false"):
            raise ParameterError(name, "this query parameter is not supported here")
    return JSONResponse(_stored(state, response_id).body)


@router.delete("/responses/{response_id}")
async def delete_response(response_id: str, state: State) -> Response:
    """Forget a response."""
    _stored(state, response_id)
    await _close_sessions(state, state.responses.delete(response_id))
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


@router.post("/conversations")
async def create_conversation(state: State, body: ConversationRequest | None = None) -> Response:
    """A conversation, which may begin with items."""
    body = body or ConversationRequest()
    messages = to_messages(body.items)
    check_outputs(messages, field="items")
    conversation = Conversation(
        conversation_id=new_id("conv"), created_at=now(), metadata=body.metadata, last_response_id=None
    )
    state.responses.add_conversation(conversation)
    if body.items:
        beginning = StoredResponse(
            response_id=new_id("items"),
            previous_id=None,
            conversation_id=conversation.conversation_id,
            session_id=None,
            instructions=None,
            messages=messages,
            body=None,
        )
        state.responses.add(beginning)
    return JSONResponse(_conversation_body(conversation))


@router.get("/conversations/{conversation_id}")
async def get_conversation(conversation_id: str, state: State) -> Response:
    """A conversation."""
    return JSONResponse(_conversation_body(_conversation(state, conversation_id)))


@router.delete("/conversations/{conversation_id}")
async def delete_conversation(conversation_id: str, state: State) -> Response:
    """Forget a conversation and its responses."""
    _conversation(state, conversation_id)
    await _close_sessions(state, state.responses.delete_conversation(conversation_id))
    return JSONResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A response to be generated: what the engine is asked, and where the response belongs."""

    response_id: str
    request: GenerateRequest | TurnRequest
    prompt: ChatPrompt
    messages: tuple[Message, ...]  # the input
    previous_id: str | None
    session_id: str | None
    is_new_session: bool


async def _prepare(state: ServerState, body: ResponseRequest) -> _Call:
    previous = _previous(state, body)
    messages, response_id = body.messages(), new_id("resp")
    if not messages:
        raise ParameterError("input", "holds no message; reasoning alone asks nothing")
    _check_tool_results(messages, previous)
    prompt = _turn(state, body, messages, previous)
    if prompt is not None:
        session, is_new_session = await _session(state, body, previous)
        session_id = session.session_id
        max_tokens = body.max_output_tokens or await _room_in(state, session, prompt)
        request = TurnRequest(
            request_id=response_id,
            session_id=session_id,
            at=time.time(),
            messages=messages,
            sampling=prompt.constrain(body.sampling(max_tokens)),
        )
    else:
        session_id, is_new_session = None, False
        past = [] if previous is None else [m for turn in state.responses.past(previous) for m in turn]
        system = [] if body.instructions is None else [Message("system", body.instructions)]
        prompt = chat_prompt(state.tokenizer, state.dialect, [*system, *past, *messages], body.to_options())
        token_ids = await state.encode(prompt.text)
        max_tokens = body.max_output_tokens or state.room_for(token_ids, DEFAULT_CHAT_TOKENS)
        request = GenerateRequest(
            request_id=response_id,
            prompt_token_ids=token_ids,
            sampling=prompt.constrain(body.sampling(max_tokens)),
        )
    return _Call(
        response_id=response_id,
        request=request,
        prompt=prompt,
        messages=messages,
        previous_id=None if previous is None else previous.response_id,
        session_id=session_id,
        is_new_session=is_new_session,
    )


def _previous(state: ServerState, body: ResponseRequest) -> StoredResponse | None:
    """The response that the input follows."""
    previous_id = body.previous_response_id
    if body.conversation_id is not None:
        previous_id = _conversation(state, body.conversation_id).last_response_id
    if previous_id is None:
        return None
    previous = state.responses.find(previous_id)
    if previous is None:
        raise ParameterError("previous_response_id", f"there is no response {previous_id}")
    return previous


def _check_tool_results(messages: tuple[Message, ...], previous: StoredResponse | None) -> None:
    """Raise ParameterError for outputs without a call, and calls without an output."""
    if previous is None:
        check_input(messages, open_ids=(), may_lack=False)
        return
    # A call that max_output_tokens cut is none that a tool could have answered.
    is_cut = previous.body is not None and previous.body["status"] == "incomplete"
    check_input(messages, open_ids=open_calls(previous.messages), may_lack=is_cut)


def _turn(
    state: ServerState, body: ResponseRequest, messages: tuple[Message, ...], previous: StoredResponse | None
) -> ChatPrompt | None:
    """The input as the next turn of a session; None if it cannot be one."""
    tokenizer, options = state.tokenizer, body.to_options()
    refusal = tokenizer.session_tools_refusal if body.tools else tokenizer.session_refusal
    if refusal is not None or not body.store:
        return None
    if body.tools and options.tool_choice == "none":
        return None  # a session's system prompt describes its tools; the model must not know of these
    roles = [message.role for message in messages]
    num_results = roles.count("tool")
    is_one_turn = set(roles[:num_results]) <= {"tool"} and set(roles[num_results:]) <= {"user"}
    if not is_one_turn or (num_results and previous is None):
        return None
    return turn_prompt(tokenizer, state.dialect, messages, options)


async def _room_in(state: ServerState, session: SessionInfo, turn: ChatPrompt) -> int:
    """The usual number of tokens of a reply, or what the session's window leaves for one; at least 1."""
    num_taken = session.num_system_tokens + len(await state.encode(turn.text))
    room = session.window - num_taken - len(state.tokenizer.reply_end_token_ids)
    return max(1, min(DEFAULT_CHAT_TOKENS, room))


async def _session(
    state: ServerState, body: ResponseRequest, previous: StoredResponse | None
) -> tuple[SessionInfo, bool]:
    """The session that ends with `previous`, or a new one (True) that begins with its past."""
    history: list[tuple[Message, ...]] = []
    if previous is not None:
        has_same_system = (previous.instructions, _tools_of(previous)) == (body.instructions, body.tools)
        session_id = previous.session_id
        session = None if session_id is None else await _session_ending_with(state, session_id, previous)
        if session is not None and has_same_system:
            return session, False
        history = state.responses.past(previous)
    started = time.time() - len(history)
    config = SessionConfig(
        session_id=new_id("conversation"),
        system=body.instructions,
        history=tuple((started + number, messages) for number, messages in enumerate(history)),
        tools=tuple(function.for_template() for function in body.functions),
    )
    return await state.engine.open_session(config), True


def _tools_of(response: StoredResponse) -> tuple[ResponseTool, ...]:
    tools = [] if response.body is None else response.body["tools"]
    return tuple(ResponseTool.model_validate(tool) for tool in tools)


async def _session_ending_with(
    state: ServerState, session_id: str, response: StoredResponse
) -> SessionInfo | None:
    """The session, if the response is its last turn and no other call goes on from there: then another turn
    can be appended."""
    try:
        session = await state.engine.session(session_id)
    except (SessionNotFoundError, SessionLockedError):
        # Deleted by its own id, lost with the engine's memory, or held by another engine on this store.
        return None
    is_last = bool(session.turns) and session.turns[-1].request_id == response.response_id
    return session if is_last and not session.is_busy else None


class _Reply:
    """One response as it is generated."""

    def __init__(self, state: ServerState, body: ResponseRequest, call: _Call) -> None:
        self._state = state
        self._body = body
        self.call = call
        self._reader = ReplyReader(call.prompt)
        self._output = Output()
        self._created_at = now()
        self._last: GenerateChunk | None = None

    async def stream(self, chunks: AsyncIterator[GenerateChunk]) -> AsyncIterator[bytes]:
        """The stream's events."""
        number = 0

        def numbered(item: StreamEvent) -> bytes:
            nonlocal number
            number += 1
            return named_event(item | {"sequence_number": number - 1})

        with self.forgotten_on_error():
            for kind in ("response.created", "response.in_progress"):
                yield numbered({"type": kind, "response": self._to_body("in_progress")})
            async for chunk in chunks:
                for item in self.add(chunk):
                    yield numbered(item)
            response = await self.finish()
        yield numbered({"type": f"response.{response['status']}", "response": response})

    @contextmanager
    def forgotten_on_error(self) -> Iterator[None]:
        """A session that was opened for a response that does not come about is deleted again."""
        try:
            yield
        except BaseException:
            if self.call.is_new_session and self.call.session_id is not None:
                self._state.run_soon(_close_sessions(self._state, {self.call.session_id}))
            raise

    def add(self, chunk: GenerateChunk) -> list[StreamEvent]:
        """Take a chunk in; the stream's events that it makes."""
        events = [item for event in self._reader.read(chunk) for item in self._output.add(event)]
        if chunk.finish_reason is not None:
            self._last = chunk
            events += self._output.finish(self._status)
        return events

    async def finish(self) -> dict[str, Any]:
        """The whole response, which is kept if the request says so."""
        body = self._to_body(self._status)
        if self._body.store:
            stored = StoredResponse(
                response_id=self.call.response_id,
                previous_id=self.call.previous_id,
                conversation_id=self._body.conversation_id,
                session_id=self.call.session_id,
                instructions=self._body.instructions,
                messages=(*self.call.messages, self._output.message()),
                body=body,
            )
            await _close_sessions(self._state, self._state.responses.add(stored))
        return body

    @property
    def _status(self) -> str:
        assert self._last is not None, "the generation has ended"
        return "incomplete" if self._last.finish_reason is FinishReason.LENGTH else "completed"

    def _to_body(self, status: str) -> dict[str, Any]:
        body, is_cut = self._body, status == "incomplete"
        given = body.model_dump(mode="json", by_alias=True)
        conversation = None if body.conversation_id is None else {"id": body.conversation_id}
        return {
            "id": self.call.response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._state.model_name,
            "output": self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "conversation": conversation,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": {k: v for k, v in given["text"]["format"].items() if v is not None}},
            "tool_choice": given["tool_choice"] or "auto",
            "tools": given["tools"],
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None if self._last is None else self._usage(self._last),
            "user": body.user,
        }

    def _usage(self, last: GenerateChunk) -> dict[str, Any]:
        ledger = total_ledger([last])
        return {
            "input_tokens": last.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": num_cached_tokens(ledger)},
            "output_tokens": ledger.generated,
            "output_tokens_details": {"reasoning_tokens": self._reader.num_reasoning_tokens},
            "total_tokens": last.num_prompt_tokens + ledger.generated,
        }


def _stored(state: ServerState, response_id: str) -> StoredResponse:
    found = state.responses.find(response_id)
    if found is None or found.body is None:
        raise ObjectNotFoundError(f"there is no response {response_id}")
    return found


def _conversation(state: ServerState, conversation_id: str) -> Conversation:
    found = state.responses.find_conversation(conversation_id)
    if found is None:
        raise ObjectNotFoundError(f"there is no conversation {conversation_id}")
    return found


def _conversation_body(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
    }


async def _close_sessions(state: ServerState, session_ids: set[str]) -> None:
    for session_id in session_ids:
        try:
            await state.engine.close_session(session_id)
        except (SessionNotFoundError, SessionLockedError):  # deleted by its own id, or another engine's
            continue
