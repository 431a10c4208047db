"""The body of chat completions: messages, tools and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dayshift.engine.dialects import Tool, ToolChoice
from dayshift.engine.server.fields import (
    ChatMessage,
    FunctionName,
    JsonSchema,
    MaxTokens,
    RequestBody,
    Text,
    TopLogprobs,
)
from dayshift.engine.server.openai_fields import OpenAIFields

DEFAULT_CHAT_TOKENS = 1024
MAX_TOOLS = 128

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
ReasoningBudget = Annotated[int, Field(ge=1, lt=2**31)]


class FunctionField(RequestBody):
    """A function. `strict`: every keyword of `parameters` is enforced, or the request refused."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonSchema | None = None
    strict: bool = False

    def to_tool(self) -> Tool:
        """The engine's form."""
        return Tool(self.name, self.parameters, self.strict)

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates describe it to the model."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class ToolField(RequestBody):
    """One of the tools; functions are the only kind."""

    type: Literal["function"]
    function: FunctionField


class ChosenFunction(RequestBody):
    """The function that must be called."""

    name: FunctionName


class NamedToolChoice(RequestBody):
    """This function must be called."""

    type: Literal["function"]
    function: ChosenFunction


class TemplateVariables(RequestBody):
    """Variables of the chat template that a request may set, as vLLM and SGLang take them."""

    enable_thinking: bool | None = None


def chosen_tools(
    tools: tuple[FunctionField, ...], choice: str | None, name: str | None
) -> tuple[tuple[FunctionField, ...], ToolChoice]:
    """The tools that may be called and whether one must be. Raises ValueError for what cannot be.

    `name` is the function that must be called, `choice` OpenAI's word otherwise.
    """
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError("tools: two functions have the same name")
    if name is not None:
        if name not in names:
            raise ValueError(f"tool_choice: there is no tool {name!r}")
        return tuple(tool for tool in tools if tool.name == name), "required"
    if not tools:
        if choice not in (None, "none"):
            raise ValueError("tool_choice: only allowed with tools")
        return (), "none"
    return tools, choice or "auto"  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What a request says about its reply, whichever API it came by.

    `effort_field` is that API's name of the reasoning effort, for errors.
    """

    functions: tuple[FunctionField, ...] = ()
    tool_choice: ToolChoice = "none"
    is_parallel: bool = True
    schema: dict[str, Any] | None = None
    effort: ReasoningEffort | None = None
    budget: int | None = None
    effort_field: str = "reasoning_effort"


class ChatRequest(OpenAIFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[tuple[ToolField, ...], Field(max_length=MAX_TOOLS)] = ()
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: ReasoningEffort | None = None
    reasoning_budget: ReasoningBudget | None = None
    """Our own: reasoning is closed after so many tokens."""
    chat_template_kwargs: TemplateVariables = TemplateVariables()
    """Our own: `enable_thinking`, as Qwen's clients send it."""
    safety_identifier: Annotated[Text, Field(max_length=256)] | None = None
    """Appears in the server's log."""

    modalities: tuple[Literal["text"], ...] = ("text",)
    service_tier: Literal["auto", "default"] = "auto"
    store: Literal[False] = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: not together with max_completion_tokens")
        if "parallel_tool_calls" in self.model_fields_set and not self.tools:
            raise ValueError("parallel_tool_calls: only allowed with tools")
        chosen_tools(self.functions, *self._choice)
        return self

    @property
    def functions(self) -> tuple[FunctionField, ...]:
        return tuple(tool.function for tool in self.tools)

    @property
    def _choice(self) -> tuple[str | None, str | None]:
        if isinstance(self.tool_choice, NamedToolChoice):
            return None, self.tool_choice.function.name
        return self.tool_choice, None

    @property
    def schema_field(self) -> str:
        return "response_format" if self.to_options().tool_choice == "none" else "tools"

    @property
    def end_user(self) -> str | None:
        return self.user or self.safety_identifier

    def to_options(self) -> ChatOptions:
        """What the request says about its reply."""
        functions, choice = chosen_tools(self.functions, *self._choice)
        effort, field = self.reasoning_effort, "reasoning_effort"
        if effort is None and self.chat_template_kwargs.enable_thinking is not None:
            effort = "high" if self.chat_template_kwargs.enable_thinking else "none"
            field = "chat_template_kwargs.enable_thinking"
        return ChatOptions(
            functions=functions,
            tool_choice=choice,
            is_parallel=self.parallel_tool_calls and not isinstance(self.tool_choice, NamedToolChoice),
            schema=None if self.response_format is None else self.response_format.schema_dict(),
            effort=effort,
            budget=self.reasoning_budget,
            effort_field=field,
        )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
