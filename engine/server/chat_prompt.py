"""From a conversation and what a request allows to a prompt and the rules of the reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dayshift.engine.api import Message, SamplingParams
from dayshift.engine.dialects import (
    Dialect,
    ReasoningFormat,
    ReasoningRules,
    ReplyRules,
    ToolFormat,
    reply_grammar,
)
from dayshift.engine.server.chat_fields import ChatOptions
from dayshift.engine.server.errors import ParameterError
from dayshift.engine.tokenizer import Tokenizer

# Tokens of reasoning in `<think>` for efforts that are no word of the model's own.
_BUDGETS: dict[str | None, int] = {"minimal": 128, "low": 1024, "medium": 4096}
_HARMONY_EFFORTS = ("low", "medium", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation, and how its reply is constrained and read."""

    text: str
    rules: ReplyRules
    dialect: Dialect

    def constrain(self, sampling: SamplingParams) -> SamplingParams:
        """Sampling of a reply that obeys the rules."""
        rules = self.rules
        is_harmony = self.dialect.reasoning is ReasoningFormat.HARMONY
        is_llama = self.dialect.tools is ToolFormat.LLAMA3 and bool(rules.callable_tools)
        sampling = replace(sampling, skip_special_tokens=not (is_harmony or is_llama))
        if not (is_harmony or rules.reasoning.is_on or rules.callable_tools):
            return replace(sampling, json_schema=rules.schema)
        return replace(sampling, grammar=reply_grammar(self.dialect, rules))


def chat_prompt(
    tokenizer: Tokenizer, dialect: Dialect, messages: Sequence[Message], options: ChatOptions
) -> ChatPrompt:
    """Render a conversation. Raises InvalidRequestError for what this model cannot do."""
    is_callable = options.tool_choice != "none"
    if is_callable and dialect.tools is None:
        raise ParameterError("tools", "this model's chat template has no tools")
    text = tokenizer.render_chat(
        messages,
        tools=[function.for_template() for function in options.functions] if is_callable else (),
        variables=_template_variables(dialect, options),
    )
    return ChatPrompt(text=text, rules=_reply_rules(dialect, options, text), dialect=dialect)


def turn_prompt(
    tokenizer: Tokenizer, dialect: Dialect, messages: Sequence[Message], options: ChatOptions
) -> ChatPrompt | None:
    """The next turn of a session, whose system prompt describes the tools; None if the options would
    change the turn's text, as reasoning that is switched off does."""
    text = tokenizer.render_turn(messages)
    variables = _template_variables(dialect, options)
    if variables and tokenizer.render_turn(messages, variables) != text:
        return None
    return ChatPrompt(text=text, rules=_reply_rules(dialect, options, text), dialect=dialect)


def _reply_rules(dialect: Dialect, options: ChatOptions, prompt: str) -> ReplyRules:
    return ReplyRules(
        tools=tuple(function.to_tool() for function in options.functions),
        tool_choice=options.tool_choice,
        is_parallel=options.is_parallel,
        schema=options.schema,
        reasoning=_reasoning_rules(dialect, options, prompt),
    )


def _template_variables(dialect: Dialect, options: ChatOptions) -> dict[str, Any]:
    effort, field = options.effort, options.effort_field
    if dialect.reasoning is None:
        if effort not in (None, "none"):
            raise ParameterError(field, "this model does not reason")
        if options.budget is not None:
            raise ParameterError("reasoning_budget", "this model does not reason")
        return {}
    if dialect.reasoning is ReasoningFormat.HARMONY:
        if effort not in (None, *_HARMONY_EFFORTS):
            raise ParameterError(field, f"this model takes {', '.join(_HARMONY_EFFORTS)}")
        return {} if effort is None else {"reasoning_effort": effort}
    if effort == "none" and not dialect.can_skip_reasoning:
        raise ParameterError(field, "this model always reasons")
    return {} if effort is None else {"enable_thinking": effort != "none"}


def _reasoning_rules(dialect: Dialect, options: ChatOptions, prompt: str) -> ReasoningRules:
    """Whether the prompt leaves reasoning to the reply, has opened it, or has closed it already."""
    if dialect.reasoning is None or options.effort == "none":
        return ReasoningRules()
    if dialect.reasoning is ReasoningFormat.HARMONY:
        return ReasoningRules(is_on=True, budget=options.budget)
    end = prompt.rstrip()
    return ReasoningRules(
        is_on=not end.endswith("</think>"),
        starts_inside=end.endswith("<think>"),
        budget=options.budget or _BUDGETS.get(options.effort),
    )
