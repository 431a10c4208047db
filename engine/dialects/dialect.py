"""Which dialect a model speaks, read off its chat template and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dayshift.engine.tokenizer import Tokenizer

_MARKERS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|start|>",
    "<|end|>",
)


class ToolFormat(StrEnum):
    """How tool calls are written."""

    HERMES = "hermes"  # <tool_call>{"name": ..., "arguments": ...}</tool_call>, as Qwen does
    LLAMA3 = "llama3"  # the reply is {"name": ..., "parameters": ...}; one call
    HARMONY = "harmony"  # a message of the commentary channel to functions.NAME, as gpt-oss does; one call


class ReasoningFormat(StrEnum):
    """How reasoning is kept apart from the answer."""

    THINK = "think"  # <think>...</think> before the answer
    HARMONY = "harmony"  # messages of the analysis channel


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a model's replies may hold beside plain text.

    `marker_ids` are the markers that the tokenizer has as tokens of their own.
    `can_skip_reasoning`: the template has a switch for it (`enable_thinking`).
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    can_skip_reasoning: bool
    marker_ids: dict[str, int]

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a reply can only be read with its control tokens in the text."""
        return ReasoningFormat.HARMONY is self.reasoning or self.tools is ToolFormat.LLAMA3


def find_dialect(tokenizer: Tokenizer) -> Dialect:
    """The dialect of a model; without a chat template, plain text."""
    source, variables = tokenizer.chat_template_source, tokenizer.chat_template_variables
    ids = {marker: token_id for marker in _MARKERS if (token_id := tokenizer.token_id(marker)) is not None}
    if "<|channel|>" in source and "<|channel|>" in ids:
        return Dialect(ToolFormat.HARMONY, ReasoningFormat.HARMONY, False, ids)
    tools = None
    if "tools" in variables:
        if "<tool_call>" in source:
            tools = ToolFormat.HERMES
        elif '"parameters"' in source:
            tools = ToolFormat.LLAMA3
    can_think = "</think>" in source and {"<think>", "</think>"} <= set(ids)
    return Dialect(
        tools=tools,
        reasoning=ReasoningFormat.THINK if can_think else None,
        can_skip_reasoning="enable_thinking" in variables,
        marker_ids=ids,
    )
