"""Harmony, the format of gpt-oss: a reply is a sequence of messages, each of a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

A message to `functions.NAME` is a call of that function, its text the arguments. The prompt ends
with `<|start|>assistant`, so a reply begins in a message's head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from dayshift.engine.dialects.events import (
    ContentText,
    ReasoningText,
    ReplyEvent,
    ToolCallArguments,
    ToolCallBegin,
)
from dayshift.engine.dialects.text import Buffer

_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=functions\.([A-Za-z0-9_.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser:
    """Reads messages of the analysis channel as reasoning, of all others as the answer."""

    def __init__(self) -> None:
        self._buffer = Buffer()
        self._head = ""
        self._piece: Callable[[str], ReplyEvent] | None = None  # of the message that is being read
        self._num_calls = 0
        self._has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        return self._piece is ReasoningText

    def push(self, text: str) -> list[ReplyEvent]:
        self._buffer.text += text
        return list(self._advance())

    def finish(self) -> list[ReplyEvent]:
        self._buffer.is_last = True
        return list(self._advance())

    def _advance(self) -> Iterator[ReplyEvent]:
        while True:
            if self._piece is None:
                text, marker = self._buffer.take_until("<|message|>")
                self._head += text
                if marker is None:
                    return
                yield from self._begin_message()
            text, marker = self._buffer.take_until(*_ENDS)
            if text:
                assert self._piece is not None, "a message has begun"
                yield self._piece(text)
            if marker is None:
                return
            self._piece = None
            self._head = marker if marker == "<|channel|>" else ""

    def _begin_message(self) -> Iterator[ReplyEvent]:
        recipient, channel = _RECIPIENT.search(self._head), _CHANNEL.search(self._head)
        if recipient is not None:
            index = self._num_calls
            self._num_calls += 1
            self._piece = lambda text: ToolCallArguments(index, text)
            yield ToolCallBegin(index, recipient[1])
        elif channel is not None and channel[1] == "analysis":
            self._piece = ReasoningText
            if self._has_reasoned:
                yield ReasoningText("\n")
            self._has_reasoned = True
        else:
            self._piece = ContentText
