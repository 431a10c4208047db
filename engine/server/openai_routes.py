"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from dayshift.engine.api import GenerateChunk, GenerateRequest
from dayshift.engine.server.choices import ChatFormat, CompletionFormat, ReplyFormat
from dayshift.engine.server.errors import ParameterError
from dayshift.engine.server.openai_fields import (
    DEFAULT_CHAT_TOKENS,
    ChatRequest,
    CompletionRequest,
    OpenAIFields,
    usage_of,
)
from dayshift.engine.server.state import ServerState, State
from dayshift.engine.server.streaming import DONE, EventStream, collect, event, observed, submit

router = APIRouter(prefix="/v1")


@router.get("/models")
async def list_models(state: State) -> Response:
    """The one model that is served."""
    model = {"id": state.model_name, "object": "model", "created": 0, "owned_by": "dayshift"}
    return JSONResponse({"object": "list", "data": [model]})


@router.get("/models/{name:path}")
async def get_model(name: str, state: State) -> Response:
    """The model of this name."""
    state.check_model(name)
    return JSONResponse({"id": name, "object": "model", "created": 0, "owned_by": "dayshift"})


@router.post("/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, state: State) -> Response:
    """A whole conversation in, the assistant's reply out."""
    state.check_model(body.model)
    tokenizer = state.tokenizer
    text = tokenizer.render_chat([message.to_message() for message in body.messages])
    prompt = tuple(await asyncio.to_thread(tokenizer.encode, text))
    room = state.engine.info.max_context_tokens - len(prompt)
    max_tokens = body.max_tokens or body.max_completion_tokens or max(1, min(DEFAULT_CHAT_TOKENS, room))
    reply = _Reply(state, body, ChatFormat(tokenizer, body.num_logprobs is not None), "chatcmpl", [prompt])
    return await reply.respond(request, max_tokens=max_tokens, logprobs=body.num_logprobs)


@router.post("/completions")
async def create_completion(body: CompletionRequest, request: Request, state: State) -> Response:
    """Texts or token ids in, their continuations out."""
    state.check_model(body.model)
    prompts = [
        tuple(await asyncio.to_thread(state.tokenizer.encode, prompt, add_special_tokens=True))
        if isinstance(prompt, str)
        else prompt
        for prompt in body.prompt
    ]
    if not all(prompts):
        raise ParameterError("prompt", "must not be empty")
    reply = _Reply(state, body, CompletionFormat(state.tokenizer), "cmpl", prompts)
    return await reply.respond(request, max_tokens=body.max_tokens, logprobs=body.logprobs)


class _Reply:
    """The response to one request: its choices are prompts x n, in that order."""

    def __init__(
        self,
        state: ServerState,
        body: OpenAIFields,
        reply_format: ReplyFormat,
        id_prefix: str,
        prompts: list[tuple[int, ...]],
    ) -> None:
        self._state = state
        self._body = body
        self._format = reply_format
        self._prompts = prompts
        self._id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def respond(self, request: Request, *, max_tokens: int, logprobs: int | None) -> Response:
        """Generate all choices, and send them as they come or together."""
        requests = [
            GenerateRequest(
                request_id=f"{self._id}-{index}",
                prompt_token_ids=prompt,
                sampling=self._body.sampling(index, max_tokens=max_tokens, logprobs=logprobs),
                priority=self._body.priority,
            )
            for index, prompt in enumerate(prompt for prompt in self._prompts for _ in range(self._body.n))
        ]
        stream = await submit(self._state, request, requests)
        chunks = observed(self._state, stream, label=request.url.path, user=self._body.user)
        if self._body.stream:
            return EventStream(stream, self._events(chunks))
        return JSONResponse(self._whole(await collect(request, stream, chunks)))

    def _whole(self, chunks: list[GenerateChunk]) -> dict[str, Any]:
        by_choice: dict[int, list[GenerateChunk]] = {i: [] for i in range(len(self._prompts) * self._body.n)}
        for chunk in chunks:
            by_choice[_index(chunk)].append(chunk)
        choices = [
            self._format.whole(index, parts, with_token_ids=self._body.return_token_ids)
            for index, parts in by_choice.items()
        ]
        usage = self._usage([parts[-1] for parts in by_choice.values()])
        return self._envelope(self._format.whole_object, choices) | {"usage": usage}

    async def _events(self, chunks: AsyncIterator[GenerateChunk]) -> AsyncIterator[bytes]:
        finals: list[GenerateChunk] = []
        no_usage = {"usage": None} if self._body.wants_usage_chunk else {}
        begun: set[int] = set()
        async for chunk in chunks:
            index = _index(chunk)
            for choice in self._format.deltas(
                index, chunk, is_first=index not in begun, with_token_ids=self._body.return_token_ids
            ):
                yield event(self._envelope(self._format.chunk_object, [choice]) | no_usage)
            begun.add(index)
            if chunk.finish_reason is not None:
                finals.append(chunk)
        if self._body.wants_usage_chunk:
            yield event(self._envelope(self._format.chunk_object, []) | {"usage": self._usage(finals)})
        yield DONE

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._state.model_name,
            "choices": choices,
        }

    def _usage(self, finals: list[GenerateChunk]) -> dict[str, Any]:
        return usage_of(finals, num_prompt_tokens=sum(map(len, self._prompts)))


def _index(chunk: GenerateChunk) -> int:
    return int(chunk.request_id.rpartition("-")[2])
