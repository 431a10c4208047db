"""What the bodies of chats and completions have in common, and the body of completions.

Fields of OpenAI's API that are not supported are declared with the one value that changes nothing.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BeforeValidator, Field, model_validator

from dayshift.engine.api import FinishReason, GenerateChunk, SamplingParams, TokenLedger
from dayshift.engine.server.fields import (
    MAX_CHOICES,
    JsonSchema,
    MaxTokens,
    RequestBody,
    SamplingFields,
    Text,
    TokenId,
    TopLogprobs,
)

DEFAULT_COMPLETION_TOKENS = 16
_MAX_PROMPTS = 256


class JsonSchemaFormat(RequestBody):
    """`strict` changes nothing: the schema is always enforced."""

    name: str
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool = True


class ResponseFormat(RequestBody):
    """How the reply must look."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema_if_needed(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('json_schema goes with type "json_schema"')
        return self

    def schema_dict(self) -> dict[str, Any] | None:
        """The schema to enforce, if any."""
        if self.type == "json_object":
            return {"type": "object"}
        return None if self.json_schema is None else self.json_schema.json_schema


class StreamOptions(RequestBody):
    """`include_usage`: one more chunk at the end, with usage and without choices.

    `continuous_usage_stats`, as vLLM has it: with `include_usage`, every chunk carries the usage so far.
    `include_obfuscation`, random text that hides how long tokens are, cannot be asked for.
    """

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _continuous_needs_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats: only allowed with include_usage")
        return self


class OpenAIFields(SamplingFields):
    """What chats and completions have in common."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: Annotated[Text, Field(max_length=256)] | None = None
    """Appears in the server's log."""
    return_token_ids: bool = False
    """Our own: `token_ids` beside each choice's text."""

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream")
        return self

    @property
    def schema_field(self) -> str:
        """The field that a reply's schema or grammar came from."""
        return "response_format"

    @property
    def end_user(self) -> str | None:
        """Whom the client says it speaks for."""
        return self.user

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_in_every_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, choice: int, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Sampling of one of the n choices; a given seed makes each choice its own, reproducibly."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=None if self.seed is None else self.seed + choice,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
        )


def _as_prompts(value: Any) -> Any:
    """One prompt or several, each a text or token ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and isinstance(value[0], int):
        return [value]
    return value


class CompletionRequest(OpenAIFields):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        tuple[Text | Annotated[tuple[TokenId, ...], Field(min_length=1)], ...],
        BeforeValidator(_as_prompts),
        Field(min_length=1, max_length=_MAX_PROMPTS),
    ]
    max_tokens: MaxTokens = DEFAULT_COMPLETION_TOKENS
    logprobs: TopLogprobs | None = None
    echo: bool = False
    grammar: Text | None = None
    """Our own: a grammar in llguidance's Lark that the text must satisfy."""
    skip_special_tokens: bool = True
    """Our own: false leaves control tokens in the text."""

    best_of: Literal[1] = 1
    suffix: Literal[""] = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: not together with logprobs, which are not computed for the prompt")
        if self.grammar is not None and self.response_format is not None:
            raise ValueError("grammar: not together with response_format")
        return self

    @property
    def schema_field(self) -> str:
        return "response_format" if self.grammar is None else "grammar"

    def sampling(self, choice: int, *, max_tokens: int, logprobs: int | None) -> SamplingParams:
        return replace(
            super().sampling(choice, max_tokens=max_tokens, logprobs=logprobs),
            json_schema=None if self.response_format is None else self.response_format.schema_dict(),
            grammar=self.grammar,
            skip_special_tokens=self.skip_special_tokens,
        )


def usage_of(
    last_chunks: list[GenerateChunk], num_prompt_tokens: int, num_reasoning_tokens: int
) -> dict[str, Any]:
    """OpenAI's usage over all choices, with the token ledger under `dayshift`."""
    total = total_ledger(last_chunks)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": total.generated,
        "total_tokens": num_prompt_tokens + total.generated,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens(total)},
        "completion_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
        "dayshift": msgspec.to_builtins(total),
    }


def total_ledger(last_chunks: list[GenerateChunk]) -> TokenLedger:
    """The ledgers of finished generations, added up."""
    ledgers = [chunk.ledger or TokenLedger() for chunk in last_chunks]
    names = [field.name for field in fields(TokenLedger)]
    return TokenLedger(**{name: sum(getattr(ledger, name) for ledger in ledgers) for name in names})


def num_cached_tokens(ledger: TokenLedger) -> int:
    """Prompt tokens that did not have to be computed."""
    return ledger.reused + ledger.restored + ledger.recalled


def finish_reason_of(chunk: GenerateChunk, *, has_tool_calls: bool = False) -> str | None:
    """OpenAI's word for the end of a choice."""
    if chunk.finish_reason is None:
        return None
    if chunk.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if has_tool_calls else "stop"
