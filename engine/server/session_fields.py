"""Bodies of the session API."""

from __future__ import annotations

import time
from typing import Annotated, Self

from pydantic import Field, model_validator

from dayshift.engine.api import (
    MatchKind,
    Message,
    OnMatch,
    RecallMode,
    RecallPresent,
    RecallRange,
    SamplingParams,
    SessionConfig,
    TurnRequest,
)
from dayshift.engine.server.chat_fields import MAX_TOOLS, ToolField
from dayshift.engine.server.fields import (
    ChatMessage,
    JsonSchema,
    MaxTokens,
    RequestBody,
    RequestId,
    SamplingFields,
    Seconds,
    SessionId,
    Text,
    TokenId,
    TopLogprobs,
)

TimeRange = tuple[Seconds, Seconds]
Messages = Annotated[tuple[ChatMessage, ...], Field(min_length=1)]


class PastTurn(RequestBody):
    """A turn that happened elsewhere: one user message and all that followed it."""

    at: Seconds
    messages: Messages


class OpenSessionBody(RequestBody):
    """Body of POST /v1/sessions; see `SessionConfig`."""

    session_id: SessionId | None = None
    system: Text | None = None
    window: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    high_water: Annotated[float, Field(gt=0, le=1)] = 1.0
    low_water: Annotated[float, Field(gt=0, le=1)] = 0.75
    recall_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    history: tuple[PastTurn, ...] = ()
    tools: Annotated[tuple[ToolField, ...], Field(max_length=MAX_TOOLS)] = ()

    def to_config(self) -> SessionConfig:
        """The engine's form."""
        return SessionConfig(
            session_id=self.session_id,
            system=self.system,
            window=self.window,
            high_water=self.high_water,
            low_water=self.low_water,
            recall_budget=self.recall_budget,
            history=tuple((turn.at, tuple(m.to_message() for m in turn.messages)) for turn in self.history),
            tools=tuple(tool.function.for_template() for tool in self.tools),
        )


class TurnBody(SamplingFields):
    """Body of POST /v1/sessions/{id}/turns; see `TurnRequest` and `SamplingParams`."""

    text: Text | None = None
    messages: Messages | None = None
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)] | None = None
    at: Seconds = Field(default_factory=time.time)
    request_id: RequestId | None = None
    recall_range: TimeRange | None = None
    recall_mode: RecallMode = RecallMode.KV
    recall_present: RecallPresent = RecallPresent.IGNORE
    retain_until: Seconds | None = None
    max_tokens: MaxTokens = 256
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    json_schema: JsonSchema | None = None
    grammar: Text | None = None
    skip_special_tokens: bool = True
    logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _has_one_input(self) -> Self:
        if sum(given is not None for given in (self.text, self.messages, self.token_ids)) != 1:
            raise ValueError("exactly one of text, messages and token_ids is needed")
        return self

    def to_request(self, session_id: str, default_id: str) -> TurnRequest:
        """The engine's form."""
        messages = tuple(message.to_message() for message in self.messages or ())
        return TurnRequest(
            request_id=self.request_id or default_id,
            session_id=session_id,
            at=self.at,
            messages=messages if self.text is None else (Message("user", self.text),),
            token_ids=self.token_ids or (),
            recall_range=None if self.recall_range is None else RecallRange(*self.recall_range),
            recall_mode=self.recall_mode,
            recall_present=self.recall_present,
            priority=self.priority,
            retain_until=self.retain_until,
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                seed=self.seed,
                stop=self.stop,
                ignore_eos=self.ignore_eos,
                json_schema=self.json_schema,
                grammar=self.grammar,
                logprobs=self.logprobs,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                repetition_penalty=self.repetition_penalty,
                logit_bias=tuple(self.logit_bias.items()),
                skip_special_tokens=self.skip_special_tokens,
            ),
        )


class Trigger(RequestBody):
    """See `OnMatch`."""

    text: Text = ""
    match: MatchKind = MatchKind.SUBSTRING
    range: TimeRange | None = None
    last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    range_in_call: bool = False
    similar_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_score: Annotated[float, Field(ge=-1, le=1)] = 0.0

    def to_on_match(self) -> OnMatch:
        """The engine's form."""
        return OnMatch(
            text=self.text,
            match=self.match,
            range=None if self.range is None else RecallRange(*self.range),
            last_n=self.last_n,
            range_in_call=self.range_in_call,
            similar_n=self.similar_n,
            min_score=self.min_score,
        )


class TriggersBody(RequestBody):
    """Body of PUT /v1/sessions/{id}/triggers; replaces all triggers."""

    triggers: tuple[Trigger, ...]


class ForkBody(RequestBody):
    """Body of POST /v1/sessions/{id}/fork."""

    session_id: SessionId | None = None
    """Id of the new session; default: a new one."""
