"""POST /v1/chat/completions, POST /v1/completions, GET /v1/models; POST /v1/embeddings is refused."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from dayshift.engine.api import GenerateChunk, GenerateRequest, SamplingParams
from dayshift.engine.server.body_route import BodyRoute
from dayshift.engine.server.chat_fields import DEFAULT_CHAT_TOKENS, ChatRequest
from dayshift.engine.server.chat_prompt import chat_prompt
from dayshift.engine.server.choices import ChatFormat, CompletionFormat, ReplyFormat
from dayshift.engine.server.errors import ParameterError, UnsupportedEndpointError
from dayshift.engine.server.openai_fields import CompletionRequest, OpenAIFields, usage_of
from dayshift.engine.server.state import ServerState, State
from dayshift.engine.server.streaming import DONE, EventStream, collect, event, observed, submit
from dayshift.engine.server.tool_results import check_chat

router = APIRouter(prefix="/v1", route_class=BodyRoute)


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
    messages = [message.to_message() for message in body.messages]
    check_chat(messages)
    prompt = chat_prompt(state.tokenizer, state.dialect, messages, body.to_options())
    token_ids = await state.encode(prompt.text)
    max_tokens = (
        body.max_tokens or body.max_completion_tokens or state.room_for(token_ids, DEFAULT_CHAT_TOKENS)
    )
    return await _Reply(
        state,
        body,
        ChatFormat(state.tokenizer, prompt, with_logprobs=body.logprobs),
        "chatcmpl",
        [token_ids],
        lambda choice: prompt.constrain(
            body.sampling(choice, max_tokens=max_tokens, logprobs=body.num_logprobs)
        ),
    ).respond(request)


@router.post("/completions")
async def create_completion(body: CompletionRequest, request: Request, state: State) -> Response:
    """Texts or token ids in, their continuations out."""
    state.check_model(body.model)
    prompts = [
        await state.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        for prompt in body.prompt
    ]
    if not all(prompts):
        raise ParameterError("prompt", "must not be empty")
    echoes = None
    if body.echo:
        texts = [prompt if isinstance(prompt, str) else state.decode(prompt) for prompt in body.prompt]
        echoes = [text for text in texts for _ in range(body.n)]
    return await _Reply(
        state,
        body,
        CompletionFormat(state.tokenizer, echoes=echoes),
        "cmpl",
        prompts,
        lambda choice: body.sampling(choice, max_tokens=body.max_tokens, logprobs=body.logprobs),
    ).respond(request)


@router.post("/embeddings", include_in_schema=False)
async def refuse_embeddings() -> Response:
    """Dayshift serves generating models only."""
    raise UnsupportedEndpointError("/v1/embeddings is not served: this engine's models generate text")


class _Reply:
    """The response to one request: its choices are prompts x n, in that order."""

    def __init__(
        self,
        state: ServerState,
        body: OpenAIFields,
        reply_format: ReplyFormat,
        id_prefix: str,
        prompts: list[tuple[int, ...]],
        sampling_of: Callable[[int], SamplingParams],
    ) -> None:
        self._state = state
        self._body = body
        self._format = reply_format
        self._prompts = prompts
        self._sampling_of = sampling_of  # by choice
        self._id = f"{id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def respond(self, request: Request) -> Response:
        """Generate all choices, and send them as they come or together."""
        requests = [
            GenerateRequest(
                request_id=f"{self._id}-{index}",
                prompt_token_ids=prompt,
                sampling=self._sampling_of(index),
                priority=self._body.priority,
            )
            for index, prompt in enumerate(prompt for prompt in self._prompts for _ in range(self._body.n))
        ]
        schema_field = self._body.schema_field
        stream = await submit(self._state, request, requests, schema_field=schema_field)
        chunks = observed(
            self._state,
            stream,
            label=request.url.path,
            user=self._body.end_user,
            schema_field=schema_field,
        )
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
        usage: dict[str, Any] = {"usage": None} if self._body.wants_usage_chunk else {}
        begun: set[int] = set()
        num_generated = 0
        async for chunk in chunks:
            index = _index(chunk)
            num_generated += len(chunk.token_ids)
            if self._body.wants_usage_in_every_chunk:
                usage = {"usage": self._usage_so_far(num_generated)}
            for choice in self._format.deltas(
                index, chunk, is_first=index not in begun, with_token_ids=self._body.return_token_ids
            ):
                yield event(self._envelope(self._format.chunk_object, [choice]) | usage)
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

    def _usage_so_far(self, num_generated: int) -> dict[str, int]:
        num_prompt_tokens = sum(map(len, self._prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt_tokens + num_generated,
        }

    def _usage(self, finals: list[GenerateChunk]) -> dict[str, Any]:
        return usage_of(
            finals,
            num_prompt_tokens=sum(map(len, self._prompts)),
            num_reasoning_tokens=self._format.num_reasoning_tokens,
        )


def _index(chunk: GenerateChunk) -> int:
    return int(chunk.request_id.rpartition("-")[2])
