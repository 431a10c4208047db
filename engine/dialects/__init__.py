"""How model families write reasoning and tool calls: what to allow, and how to read it. No torch here.

`find_dialect` reads it off a model's chat template and tokenizer. `reply_grammar` describes the
replies that a request allows; a `ReplyParser` takes such a reply apart as it comes.
"""

from dayshift.engine.dialects.dialect import Dialect, ReasoningFormat, ToolFormat, find_dialect
from dayshift.engine.dialects.events import (
    ContentText,
    ReasoningText,
    ReplyEvent,
    ReplyParser,
    ToolCallArguments,
    ToolCallBegin,
)
from dayshift.engine.dialects.grammars import (
    ReasoningRules,
    ReplyRules,
    Tool,
    ToolChoice,
    reply_grammar,
)
from dayshift.engine.dialects.parsers import make_parser

__all__ = [
    "ContentText",
    "Dialect",
    "ReasoningFormat",
    "ReasoningRules",
    "ReasoningText",
    "ReplyEvent",
    "ReplyParser",
    "ReplyRules",
    "Tool",
    "ToolCallArguments",
    "ToolCallBegin",
    "ToolChoice",
    "ToolFormat",
    "find_dialect",
    "make_parser",
    "reply_grammar",
]
