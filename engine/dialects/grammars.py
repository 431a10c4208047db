"""Grammars of whole replies in llguidance's Lark: reasoning, then an answer or tool calls.

Reasoning, JSON schemas and tool calls are parts of one grammar, so that any combination of them is
valid from the first token to the last. Markers that are tokens of their own are only allowed where
the grammar names them; free text cannot hold them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dayshift.engine.dialects.dialect import Dialect, ReasoningFormat, ToolFormat

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_TEXT = "TEXT: /(.|\\n)*/"
_BREAK = "BREAK: /\\n{1,2}/"
# As models write it: {"a": 1, "b": 2}.
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}

ToolChoice = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    `parameters` is the JSON schema of its arguments. `is_strict`: a keyword of it that cannot be
    enforced is an error; otherwise it is only asked for in the prompt.
    """

    name: str
    parameters: dict[str, Any] | None = None
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningRules:
    """Whether a reply may begin with reasoning.

    `starts_inside`: the prompt has opened it already. `budget`: after so many tokens it is closed.
    """

    is_on: bool = False
    starts_inside: bool = False
    budget: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRules:
    """What a request allows its reply to be. `schema` is of the answer's text."""

    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "none"
    is_parallel: bool = True
    schema: dict[str, Any] | None = None
    reasoning: ReasoningRules = ReasoningRules()

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return () if self.tool_choice == "none" else self.tools


def reply_grammar(dialect: Dialect, rules: ReplyRules) -> str | None:
    """The grammar of the replies that `rules` allow; None if any text is one."""
    if dialect.reasoning is ReasoningFormat.HARMONY:
        return _harmony(dialect, rules)
    body = _body(dialect, rules)
    reasoning = _think(dialect, rules.reasoning)
    if reasoning is None:
        return None if body is None else _join(["start: body", *body])
    if body is None and rules.reasoning.budget is None:
        return None
    is_text = body is None
    gap = "" if is_text else "BREAK? "
    return _join(
        [f"start: {reasoning[0]} {gap}body", *reasoning[1:], *(["body: TEXT"] if body is None else body)]
    )


def _think(dialect: Dialect, rules: ReasoningRules) -> list[str] | None:
    """How the reply begins, and the rules needed for it."""
    if dialect.reasoning is None or not rules.is_on:
        return None
    opened, closed = _token(dialect, "<think>"), _token(dialect, "</think>")
    thought = _limited_text("thought", rules.budget)
    if rules.starts_inside:
        return [f"thought {closed}", thought]
    return ["thinking?", f"thinking: {opened} thought {closed}", thought]


def _body(dialect: Dialect, rules: ReplyRules) -> list[str] | None:
    """The rule `body` and what it needs; None if it is free text."""
    schema = [] if rules.schema is None else [f"answer: {_json(rules.schema, _COMPACT)}"]
    if not rules.callable_tools:
        return ["body: answer", *schema] if schema else None
    if dialect.tools is ToolFormat.HERMES:
        return _hermes_body(dialect, rules, schema)
    return _llama_body(dialect, rules, schema)


def _hermes_body(dialect: Dialect, rules: ReplyRules, schema: list[str]) -> list[str]:
    opened, closed = _token(dialect, "<tool_call>"), _token(dialect, "</tool_call>")
    lines = [
        'calls: call ("\\n" call)*' if rules.is_parallel else "calls: call",
        f'call: {opened} "\\n" invocation "\\n" {closed}',
        *_invocations(rules.callable_tools, "arguments"),
        *schema,
    ]
    if rules.tool_choice == "required":
        return ["body: calls", *lines]
    if schema:
        return ["body: answer | calls", *lines]
    if "<tool_call>" in dialect.marker_ids:
        return ["body: TEXT calls?", *lines]
    # The marker is plain text: whatever text leads up to it, a call follows.
    first = f'first: lead "\\n" invocation "\\n" {closed}'
    more = "first more*" if rules.is_parallel else "first"
    return [
        f"body: TEXT | {more}",
        first,
        "lead[lazy]: /(.|\\n)*<tool_call>/",
        'more: "\\n" call',
        *lines[1:],
    ]


def _llama_body(dialect: Dialect, rules: ReplyRules, schema: list[str]) -> list[str]:
    tag = f"{_token(dialect, '<|python_tag|>')}? " if "<|python_tag|>" in dialect.marker_ids else ""
    lines = [f"call: {tag}invocation", *_invocations(rules.callable_tools, "parameters"), *schema]
    if rules.tool_choice == "required":
        return ["body: call", *lines]
    answer = "answer" if schema else "PLAIN?"
    return [f"body: {answer} | call", *lines, *([] if schema else ["PLAIN: /[^{](.|\\n)*/"])]


def _harmony(dialect: Dialect, rules: ReplyRules) -> str:
    channel, message, end, start, constrain = (
        _token(dialect, marker)
        for marker in ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>")
    )
    next_message = f'{end} {start} "assistant"'
    final = f'final: {channel} "final" {message} TEXT'
    if rules.schema is not None:
        final = f'final: {channel} "final" (" " {constrain} "json")? {message} answer'
    lines = [
        f'analysis: {channel} "analysis" {message} thought {next_message}',
        _limited_text("thought", rules.reasoning.budget),
        final,
        *([] if rules.schema is None else [f"answer: {_json(rules.schema, _COMPACT)}"]),
    ]
    analysis = "analysis*" if rules.reasoning.budget is None else "analysis?"
    if not rules.callable_tools:
        return _join([f"start: {analysis} final", *lines])
    kind = f'(" " {constrain} "json" | " json")'
    lines += [
        f'preamble: {channel} "commentary" {message} TEXT {next_message}',
        f"call: {' | '.join(f'call{i}' for i in range(len(rules.callable_tools)))}",
    ]
    for i, tool in enumerate(rules.callable_tools):
        to = f"to=functions.{tool.name}"
        lines += [
            f'call{i}: ({channel} "commentary {to}" | " {to}" {channel} "commentary") '
            f"{kind} {message} arguments{i}",
            f"arguments{i}: {_arguments(tool)}",
        ]
    last = "call" if rules.tool_choice == "required" else "(final | preamble? call)"
    return _join([f"start: {analysis} {last}", *lines])


def _invocations(tools: tuple[Tool, ...], key: str) -> list[str]:
    lines = [f"invocation: {' | '.join(f'invocation{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
        lines += [f'invocation{i}: {head} arguments{i} "}}"', f"arguments{i}: {_arguments(tool)}"]
    return lines


def _arguments(tool: Tool) -> str:
    return _json(tool.parameters or _NO_ARGUMENTS, _SPACED | {"lenient": not tool.is_strict})


def _json(schema: dict[str, Any], options: dict[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _limited_text(name: str, budget: int | None) -> str:
    return f"{name}: TEXT" if budget is None else f"{name}[max_tokens={budget}]: TEXT"


def _token(dialect: Dialect, marker: str) -> str:
    token_id = dialect.marker_ids.get(marker)
    return json.dumps(marker) if token_id is None else f"<[{token_id}]>"


def _join(lines: list[str]) -> str:
    needed: dict[str, Callable[[str], bool]] = {_TEXT: lambda s: "TEXT" in s, _BREAK: lambda s: "BREAK" in s}
    text = "\n".join(lines)
    return "\n".join([text, *(rule for rule, is_used in needed.items() if is_used(text))])
