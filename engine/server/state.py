"""What the routes share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request

from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.dialects import Dialect
from dayshift.engine.server.errors import ParameterError
from dayshift.engine.server.limits import NO_LIMITS, Limits
from dayshift.engine.server.metrics import Metrics
from dayshift.engine.server.response_store import ResponseStore
from dayshift.engine.tokenizer import Tokenizer
from dayshift.engine.wire import ModelNotFoundError


@dataclass(frozen=True, slots=True)
class ServerState:
    """One engine behind one app."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    dialect: Dialect
    model_name: str
    metrics: Metrics
    responses: ResponseStore
    limits: Limits = NO_LIMITS
    tasks: set[asyncio.Task[None]] = field(default_factory=set)  # that outlive the request they are from

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError if a request names another model."""
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(f"model {name!r} is not served here; {self.model_name!r} is")

    async def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Token ids of a text, which may be long: encoded off the event loop.

        Raises ContextLengthExceededError for one that is far beyond the model's context.
        """
        most = self.engine.info.max_context_tokens
        encode = partial(
            self.tokenizer.encode_at_most,
            refusal=f"prompt (more than {2 * most} tokens) exceeds the model's context of {most} tokens",
            add_special_tokens=add_special_tokens,
        )
        return tuple(await asyncio.to_thread(encode, text, most))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids that a client sent. Raises ParameterError for ids that are none."""
        size = self.tokenizer.vocab_size
        if wrong := [token_id for token_id in token_ids if token_id >= size]:
            raise ParameterError("prompt", f"token id {wrong[0]} is outside the vocabulary of {size}")
        return self.tokenizer.decode(token_ids)

    def run_soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something whatever becomes of the request that it is for."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def room_for(self, prompt: Sequence[int], num_tokens: int) -> int:
        """`num_tokens`, or what the model's context leaves for a reply to `prompt`; at least 1."""
        return max(1, min(num_tokens, self.engine.info.max_context_tokens - len(prompt)))


async def _state(request: Request) -> ServerState:  # FastAPI calls others in a thread
    return request.app.state.server


State = Annotated[ServerState, Depends(_state)]
