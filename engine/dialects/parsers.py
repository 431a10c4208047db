"""Parsers of the dialects' replies; `make_parser` chooses. Harmony's is in `harmony.py`."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dayshift.engine.dialects.dialect import Dialect, ReasoningFormat, ToolFormat
from dayshift.engine.dialects.events import (
    ContentText,
    ReasoningText,
    ReplyEvent,
    ReplyParser,
    ToolCallArguments,
    ToolCallBegin,
)
from dayshift.engine.dialects.grammars import ReplyRules
from dayshift.engine.dialects.harmony import HarmonyParser
from dayshift.engine.dialects.text import Buffer, HeadState, JsonObjectEnd, TrailingSpace, match_call_head


def make_parser(dialect: Dialect, rules: ReplyRules) -> ReplyParser:
    """A parser for one reply that `rules` allow."""
    if dialect.reasoning is ReasoningFormat.HARMONY:
        return HarmonyParser()
    answer: ReplyParser = PlainParser()
    if rules.callable_tools:
        if dialect.tools is ToolFormat.HERMES:
            answer = HermesParser()
        else:
            answer = LlamaParser({tool.name for tool in rules.callable_tools})
    if dialect.reasoning is ReasoningFormat.THINK and rules.reasoning.is_on:
        return ThinkParser(answer, starts_inside=rules.reasoning.starts_inside)
    return answer


class PlainParser:
    """All text is the answer."""

    is_reasoning = False

    def push(self, text: str) -> list[ReplyEvent]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[ReplyEvent]:
        return []


class ThinkParser:
    """`<think>reasoning</think>`, then what another parser reads. White space around both is left out."""

    def __init__(self, answer: ReplyParser, *, starts_inside: bool) -> None:
        self._answer = answer
        self._buffer = Buffer()
        self._space = TrailingSpace()
        self._is_begun = starts_inside  # it is known whether there is reasoning
        self.is_reasoning = starts_inside
        self._is_before_text = True  # of the reasoning or, after it, of the answer

    def push(self, text: str) -> list[ReplyEvent]:
        self._buffer.text += text
        return list(self._advance())

    def finish(self) -> list[ReplyEvent]:
        self._buffer.is_last = True
        return [*self._advance(), *self._answer.finish()]

    def _advance(self) -> Iterator[ReplyEvent]:
        if not self._is_begun:
            has_reasoning = self._buffer.begins_with("<think>")
            if has_reasoning is None:
                return
            self._is_begun = True
            self.is_reasoning = has_reasoning
            self._is_before_text = has_reasoning
            if has_reasoning:
                self._buffer.take(len("<think>"))
        if self.is_reasoning:
            text, end = self._buffer.take_until("</think>")
            if text := self._space.push(self._without_leading_space(text)):
                yield ReasoningText(text)
            if end is None:
                return
            self.is_reasoning = False
            self._is_before_text = True
        text = self._without_leading_space(self._buffer.take(len(self._buffer.text)))
        yield from self._answer.push(text)

    def _without_leading_space(self, text: str) -> str:
        if self._is_before_text:
            text = text.lstrip()
            self._is_before_text = not text
        return text


class HermesParser:
    """Text and `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, any number of them."""

    is_reasoning = False

    def __init__(self) -> None:
        self._buffer = Buffer()
        self._space = TrailingSpace()
        self._read = self._text
        self._num_calls = 0
        self._arguments = JsonObjectEnd()

    def push(self, text: str) -> list[ReplyEvent]:
        self._buffer.text += text
        return list(self._advance())

    def finish(self) -> list[ReplyEvent]:
        self._buffer.is_last = True
        events = list(self._advance())
        space = self._space.take()
        return [*events, ContentText(space)] if space else events

    def _advance(self) -> Iterator[ReplyEvent]:
        """Read on until the state stays the same: the text is used up, or more is needed."""
        while True:
            state = self._read
            yield from state()
            if self._read == state:
                return

    def _text(self) -> Iterator[ReplyEvent]:
        text, marker = self._buffer.take_until("<tool_call>")
        if text := self._space.push(text):
            yield ContentText(text)
        if marker is not None:
            self._space.take()
            self._read = self._head

    def _head(self) -> Iterator[ReplyEvent]:
        head = match_call_head(self._buffer.text, "arguments")
        if head is HeadState.NO:
            yield ContentText("<tool_call>")
            self._read = self._text
        elif not isinstance(head, HeadState):
            self._buffer.take(head.length)
            self._arguments = JsonObjectEnd()
            self._num_calls += 1
            self._read = self._argument_text
            yield ToolCallBegin(self._num_calls - 1, head.name)

    def _argument_text(self) -> Iterator[ReplyEvent]:
        text = self._buffer.take(self._arguments.scan(self._buffer.text))
        if text:
            yield ToolCallArguments(self._num_calls - 1, text)
        if self._arguments.is_complete:
            self._read = self._tail

    def _tail(self) -> Iterator[ReplyEvent]:
        if self._buffer.take_until("</tool_call>")[1] is not None:
            self._read = self._text
        yield from ()


class LlamaParser:
    """Either text, or one `{"name": ..., "parameters": ...}` of a known name."""

    is_reasoning = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._buffer = Buffer()
        self._read = self._begin
        self._arguments = JsonObjectEnd()

    def push(self, text: str) -> list[ReplyEvent]:
        self._buffer.text += text
        return list(self._advance())

    def finish(self) -> list[ReplyEvent]:
        self._buffer.is_last = True
        return list(self._advance())

    def _advance(self) -> Iterator[ReplyEvent]:
        while True:
            state = self._read
            yield from state()
            if self._read == state:
                return

    def _begin(self) -> Iterator[ReplyEvent]:
        has_tag = self._buffer.begins_with("<|python_tag|>")
        if has_tag is not None and self._buffer.text:
            if has_tag:
                self._buffer.take(len("<|python_tag|>"))
            self._read = self._head
        yield from ()

    def _head(self) -> Iterator[ReplyEvent]:
        if not self._buffer.text and not self._buffer.is_last:
            return
        head = match_call_head(self._buffer.text, "parameters")
        is_cut = head is HeadState.PENDING and self._buffer.is_last
        if head is HeadState.NO or is_cut or not self._buffer.text.startswith("{"):
            self._read = self._text
        elif not isinstance(head, HeadState):
            if head.name not in self._names:
                self._read = self._text
                return
            self._buffer.take(head.length)
            self._read = self._argument_text
            yield ToolCallBegin(0, head.name)

    def _text(self) -> Iterator[ReplyEvent]:
        if text := self._buffer.take(len(self._buffer.text)):
            yield ContentText(text)

    def _argument_text(self) -> Iterator[ReplyEvent]:
        text = self._buffer.take(self._arguments.scan(self._buffer.text))
        if text:
            yield ToolCallArguments(0, text)
        if self._arguments.is_complete:
            self._read = self._rest

    def _rest(self) -> Iterator[ReplyEvent]:
        self._buffer.take(len(self._buffer.text))
        yield from ()
