"""The bodies of /v1/responses and /v1/conversations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from dayshift.engine.api import Message, SamplingParams, ToolCall
from dayshift.engine.server.chat_fields import (
    MAX_TOOLS,
    ChatOptions,
    FunctionField,
    ReasoningEffort,
    chosen_tools,
)
from dayshift.engine.server.fields import (
    CallId,
    FunctionName,
    JsonSchema,
    MaxTokens,
    RequestBody,
    Text,
    joined_parts,
)

_MAX_ITEMS = 4096
_TEXT_PARTS = ("input_text", "output_text", "text")

ObjectId = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
ItemId = Annotated[str, Field(max_length=128)]
Status = Literal["in_progress", "completed", "incomplete"]
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]], Field(max_length=16)
]


def _text_of(content: Any) -> Any:
    return joined_parts(content, _TEXT_PARTS, ignored=("annotations", "logprobs"))


ItemText = Annotated[Text, BeforeValidator(_text_of)]


class MessageItem(RequestBody):
    """A message; what a former reply says of itself (`id`, `status`) may come along."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText
    id: ItemId | None = None
    status: Status | None = None


class FunctionCallItem(RequestBody):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: Text
    id: ItemId | None = None
    status: Status | None = None


class FunctionOutputItem(RequestBody):
    """What a call returned."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: ItemText
    id: ItemId | None = None
    status: Status | None = None


class ReasoningPart(RequestBody):
    """A text of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(RequestBody):
    """Reasoning of a former reply; it goes with the message or calls that follow."""

    type: Literal["reasoning"]
    content: tuple[ReasoningPart, ...] = ()
    summary: Annotated[tuple[Any, ...], Field(max_length=0)] = ()
    id: ItemId | None = None
    status: Status | None = None


def _item_type(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]
Items = Annotated[tuple[Item, ...], Field(max_length=_MAX_ITEMS)]


def to_messages(items: Iterable[Item]) -> tuple[Message, ...]:
    """The chat messages that items are; reasoning and calls are joined to one assistant's message."""
    messages: list[Message] = []
    reasoning: str | None = None
    for item in items:
        match item:
            case ReasoningItem():
                reasoning = "".join(part.text for part in item.content)
            case FunctionCallItem():
                call = ToolCall(item.call_id, item.name, item.arguments)
                last = messages[-1] if messages else None
                if last is not None and last.role == "assistant" and reasoning is None:
                    messages[-1] = Message(
                        last.role, last.content, (*last.tool_calls, call), reasoning=last.reasoning
                    )
                else:
                    messages.append(Message("assistant", "", (call,), reasoning=reasoning))
                reasoning = None
            case FunctionOutputItem():
                messages.append(Message("tool", item.output, tool_call_id=item.call_id))
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                is_reply = role == "assistant"
                messages.append(Message(role, item.content, reasoning=reasoning if is_reply else None))
                reasoning = None
    return tuple(messages)


def _as_items(value: Any) -> Any:
    """A plain text is one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(RequestBody):
    """How the answer must look."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(max_length=64)] | None = None
    json_schema: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool = True

    @model_validator(mode="after")
    def _has_schema_if_needed(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('schema goes with type "json_schema"')
        return self

    def schema_dict(self) -> dict[str, Any] | None:
        """The schema to enforce, if any."""
        return {"type": "object"} if self.type == "json_object" else self.json_schema


class TextField(RequestBody):
    """`text` of a request."""

    format: TextFormat = TextFormat()


class ReasoningField(RequestBody):
    """`reasoning` of a request."""

    effort: ReasoningEffort | None = None


class ResponseTool(RequestBody):
    """A function; strict unless it says otherwise, as OpenAI has it."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: bool = True

    def to_function(self) -> FunctionField:
        """The function as chats have it."""
        return FunctionField.model_construct(
            name=self.name,
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )


class ResponseToolChoice(RequestBody):
    """This function must be called."""

    type: Literal["function"]
    name: FunctionName


class ConversationRef(RequestBody):
    """A conversation by its id."""

    id: ObjectId


class ResponseRequest(RequestBody):
    """Body of POST /v1/responses."""

    input: Annotated[Items, BeforeValidator(_as_items), Field(min_length=1)]
    model: str | None = None
    instructions: Text | None = None
    previous_response_id: ObjectId | None = None
    conversation: ObjectId | ConversationRef | None = None
    max_output_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    tools: Annotated[tuple[ResponseTool, ...], Field(max_length=MAX_TOOLS)] = ()
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    text: TextField = TextField()
    reasoning: ReasoningField = ReasoningField()
    stream: bool = False
    store: bool = True
    metadata: Metadata = Field(default_factory=dict)
    user: Annotated[Text, Field(max_length=256)] | None = None
    safety_identifier: Annotated[Text, Field(max_length=256)] | None = None

    background: Literal[False] = False
    include: Annotated[tuple[Any, ...], Field(max_length=0)] = ()
    service_tier: Literal["auto", "default"] = "auto"
    truncation: Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.previous_response_id is not None and self.conversation is not None:
            raise ValueError("conversation: not together with previous_response_id")
        chosen_tools(self.functions, *self._choice)
        return self

    @property
    def _choice(self) -> tuple[str | None, str | None]:
        if isinstance(self.tool_choice, ResponseToolChoice):
            return None, self.tool_choice.name
        return self.tool_choice, None

    @property
    def functions(self) -> tuple[FunctionField, ...]:
        return tuple(tool.to_function() for tool in self.tools)

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation

    @property
    def end_user(self) -> str | None:
        """Whom the client says it speaks for."""
        return self.user or self.safety_identifier

    def messages(self) -> tuple[Message, ...]:
        """The input as chat messages."""
        return to_messages(self.input)

    def to_options(self) -> ChatOptions:
        """What the request says about its reply."""
        functions, choice = chosen_tools(self.functions, *self._choice)
        return ChatOptions(
            functions=functions,
            tool_choice=choice,
            is_parallel=self.parallel_tool_calls and not isinstance(self.tool_choice, ResponseToolChoice),
            schema=self.text.format.schema_dict(),
            effort=self.reasoning.effort,
            effort_field="reasoning.effort",
        )

    def sampling(self, max_tokens: int) -> SamplingParams:
        """How tokens are chosen."""
        return SamplingParams(max_tokens=max_tokens, temperature=self.temperature, top_p=self.top_p)


class ConversationRequest(RequestBody):
    """Body of POST /v1/conversations."""

    items: Items = ()
    metadata: Metadata = Field(default_factory=dict)
