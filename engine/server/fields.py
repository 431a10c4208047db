"""Field types that the request bodies of all endpoints share.

A body is refused for any field that is not declared; a declared field has an effect, or accepts only
the value that changes nothing. `null` means the default, as in OpenAI's API.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from dayshift.engine.api import Message, ToolCall

MAX_STOP_STRINGS = 16
MAX_CHOICES = 64
MAX_TOP_LOGPROBS = 20


class RequestBody(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if value is not None}
        return body


def _encodable(value: Any) -> Any:
    """JSON may escape halves of characters (`\\ud83d`), which no tokenizer can take."""
    try:
        msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not UTF-8 text and 64-bit numbers ({type(error).__name__})") from error
    return value


def joined_parts(content: Any, types: Collection[str] = ("text",), ignored: Collection[str] = ()) -> Any:
    """The text of a message given as content parts of these types; `ignored` are fields of no effect."""
    if not isinstance(content, list):
        return content
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in types and isinstance(part.get("text"), str)
        if not is_text or set(part) - {"type", "text", *ignored}:
            wanted = " or ".join(f'"{name}"' for name in types)
            raise ValueError(f'only content parts {{"type": {wanted}, "text": ...}} are supported')
    return "".join(part["text"] for part in content)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_encodable)]
Content = Annotated[Text, BeforeValidator(joined_parts)]
JsonSchema = Annotated[dict[str, Any], AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=2**31, strict=True)]
TokenKey = Annotated[int, Field(ge=0, lt=2**31)]  # as a key of a JSON object, so as text
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Stop = Annotated[
    tuple[Annotated[Text, Field(min_length=1)], ...],
    BeforeValidator(_as_list),
    Field(max_length=MAX_STOP_STRINGS),
]
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}$")]
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
Priority = Annotated[int, Field(ge=-1000, le=1000)]
MaxTokens = Annotated[int, Field(ge=1, lt=2**31)]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CallId = Annotated[Text, Field(min_length=1, max_length=128)]


class FunctionCallField(RequestBody):
    """What was called; `arguments` is JSON text."""

    name: FunctionName
    arguments: Text


class ToolCallField(RequestBody):
    """A call in an assistant's message."""

    id: CallId
    type: Literal["function"] = "function"
    function: FunctionCallField


class ChatMessage(RequestBody):
    """A message; `developer` is OpenAI's newer name for `system`.

    An assistant's message may have tool calls and reasoning; a tool's names the call that it answers.
    """

    role: Annotated[str, Field(pattern="^(system|developer|user|assistant|tool)$")]
    content: Content | None = None
    tool_calls: tuple[ToolCallField, ...] = ()
    tool_call_id: CallId | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _has_what_its_role_needs(self) -> Self:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content are only allowed in an assistant's message")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError("tool_call_id is only allowed in a tool's message")
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is needed")
        return self

    def to_message(self) -> Message:
        """The engine's form."""
        return Message(
            "system" if self.role == "developer" else self.role,
            self.content or "",
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls
            ),
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning_content,
        )


class SamplingFields(RequestBody):
    """How tokens are chosen: what every generating endpoint takes."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    seed: Seed | None = None
    stop: Stop = ()
    ignore_eos: bool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    logit_bias: dict[TokenKey, Bias] = Field(default_factory=dict)
    priority: Priority = 0
    stream: bool = False
