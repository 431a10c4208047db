"""What a reply consists of, in the order in which it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A tool call begins; `index` counts the reply's calls from 0. Its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments' JSON of the call begun last."""

    index: int
    text: str


ReplyEvent = ReasoningText | ContentText | ToolCallBegin | ToolCallArguments


class ReplyParser(Protocol):
    """Takes one reply apart as it comes.

    The events do not depend on where the reply was cut into pieces, but for how their own texts are
    cut: a streamed reply put together is the unstreamed one. Text that may turn out to be part of a
    marker is held back.
    """

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        ...

    def push(self, text: str) -> list[ReplyEvent]:
        """What this piece of text completes."""
        ...

    def finish(self) -> list[ReplyEvent]:
        """What is left when no text follows. A tool call whose head is incomplete is dropped."""
        ...
