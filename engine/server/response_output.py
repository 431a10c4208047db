"""The output of a response, put together from its events; the same events make the stream."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from dayshift.engine.api import Message, ToolCall
from dayshift.engine.dialects import (
    ContentText,
    ReasoningText,
    ReplyEvent,
    ToolCallArguments,
    ToolCallBegin,
)
from dayshift.engine.server.choices import new_call_id

StreamEvent = dict[str, Any]


def new_id(prefix: str) -> str:
    """An id as OpenAI's objects have them."""
    return f"{prefix}_{uuid.uuid4().hex}"


class Output:
    """Items of the output. `add` and `finish` yield the stream's events that tell of the change."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def add(self, event: ReplyEvent) -> Iterator[StreamEvent]:
        """Take in what comes next in the reply."""
        match event:
            case ReasoningText(text):
                yield from self._begin_if_new("reasoning")
                yield from self._add_text(text)
            case ContentText(text):
                yield from self._begin_if_new("message")
                yield from self._add_text(text)
            case ToolCallBegin(_, name):
                yield from self._close("completed")
                yield from self._begin(
                    {"id": new_id("fc"), "type": "function_call", "call_id": new_call_id(), "name": name}
                    | {"arguments": "", "status": "in_progress"}
                )
            case ToolCallArguments(_, text):
                self.items[-1]["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def finish(self, status: str) -> Iterator[StreamEvent]:
        """Nothing follows; `status` is that of the last item. A reply without text gets an empty message."""
        if not self.items:
            yield from self._begin_if_new("message")
        yield from self._close(status)

    def message(self) -> Message:
        """The output as a message of the conversation; reasoning only where calls belong to it."""
        texts = {"message": "", "reasoning": ""}
        calls = []
        for item in self.items:
            if item["type"] == "function_call":
                calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
            else:
                texts[item["type"]] += item["content"][0]["text"]
        reasoning = texts["reasoning"] if calls and texts["reasoning"] else None
        return Message("assistant", texts["message"], tuple(calls), reasoning=reasoning)

    def _begin_if_new(self, kind: str) -> Iterator[StreamEvent]:
        if self.items and self.items[-1]["type"] == kind:
            return
        yield from self._close("completed")
        if kind == "message":
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"id": new_id("msg"), "type": "message", "role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = {"id": new_id("rs"), "type": "reasoning", "summary": []}
        yield from self._begin(item | {"content": [], "status": "in_progress"})
        self.items[-1]["content"].append(part)
        yield self._event("response.content_part.added", content_index=0, part=dict(part))

    def _begin(self, item: dict[str, Any]) -> Iterator[StreamEvent]:
        self.items.append(item)
        yield {
            "type": "response.output_item.added",
            "output_index": len(self.items) - 1,
            "item": _copied(item),
        }

    def _add_text(self, text: str) -> Iterator[StreamEvent]:
        item = self.items[-1]
        item["content"][0]["text"] += text
        extra = {"logprobs": []} if item["type"] == "message" else {}
        yield self._event(f"{_text_kind(item)}.delta", content_index=0, delta=text, **extra)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        """End the item that is in progress, if there is one."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            part = item["content"][0]
            extra = {"logprobs": []} if item["type"] == "message" else {}
            yield self._event(f"{_text_kind(item)}.done", content_index=0, text=part["text"], **extra)
            yield self._event("response.content_part.done", content_index=0, part=dict(part))
        yield {
            "type": "response.output_item.done",
            "output_index": len(self.items) - 1,
            "item": _copied(item),
        }

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        return {
            "type": kind,
            "item_id": self.items[-1]["id"],
            "output_index": len(self.items) - 1,
            **fields,
        }


def _text_kind(item: dict[str, Any]) -> str:
    return "response.output_text" if item["type"] == "message" else "response.reasoning_text"


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now: the stream's events are written later than made."""
    return item | {"content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
