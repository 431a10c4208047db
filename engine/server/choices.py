"""How chats and completions write a choice, whole and in pieces."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from dayshift.engine.api import GenerateChunk, TokenLogprob
from dayshift.engine.dialects import (
    ContentText,
    ReasoningText,
    ReplyEvent,
    ToolCallArguments,
    ToolCallBegin,
    make_parser,
)
from dayshift.engine.server.chat_prompt import ChatPrompt
from dayshift.engine.server.openai_fields import finish_reason_of
from dayshift.engine.tokenizer import Tokenizer


class ReplyFormat(Protocol):
    """One of OpenAI's two ways to write choices."""

    whole_object: str
    chunk_object: str

    @property
    def num_reasoning_tokens(self) -> int:
        """Generated tokens of all choices that were reasoning."""
        ...

    def whole(self, index: int, chunks: list[GenerateChunk], *, with_token_ids: bool) -> dict[str, Any]:
        """A finished choice from its chunks."""
        ...

    def deltas(
        self, index: int, chunk: GenerateChunk, *, is_first: bool, with_token_ids: bool
    ) -> Iterator[dict[str, Any]]:
        """The pieces that a chunk adds to a choice; the last one carries the finish reason."""
        ...


class ReplyReader:
    """Reads one reply, chunk by chunk."""

    def __init__(self, prompt: ChatPrompt) -> None:
        self._parser = make_parser(prompt.dialect, prompt.rules)
        self._arguments: str | None = None  # of the last call
        self.num_reasoning_tokens = 0

    def read(self, chunk: GenerateChunk) -> list[ReplyEvent]:
        """What a chunk adds to the reply."""
        was_reasoning = self._parser.is_reasoning
        events = self._parser.push(chunk.text)
        if was_reasoning or self._parser.is_reasoning:
            self.num_reasoning_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            events += self._parser.finish()
        for item in events:
            if isinstance(item, ToolCallBegin):
                self._arguments = ""
            elif isinstance(item, ToolCallArguments):
                self._arguments = (self._arguments or "") + item.text
        return events

    @property
    def has_tool_calls(self) -> bool:
        """There are calls, and the last one is whole: a stop string may have cut it."""
        if self._arguments is None:
            return False
        try:
            json.loads(self._arguments)
        except ValueError:
            return False
        return True


class ChatFormat:
    """Choices of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, prompt: ChatPrompt, *, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._with_logprobs = with_logprobs
        self._readers: dict[int, ReplyReader] = {}

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(reader.num_reasoning_tokens for reader in self._readers.values())

    def whole(self, index: int, chunks: list[GenerateChunk], *, with_token_ids: bool) -> dict[str, Any]:
        reader = self._reader(index)
        message = _Message()
        for chunk in chunks:
            for event in reader.read(chunk):
                message.add(event)
        choice = {
            "index": index,
            "message": message.to_dict(),
            "logprobs": self._logprobs(chunks),
            "finish_reason": finish_reason_of(chunks[-1], has_tool_calls=reader.has_tool_calls),
        }
        return choice | _token_ids(chunks, with_token_ids)

    def deltas(
        self, index: int, chunk: GenerateChunk, *, is_first: bool, with_token_ids: bool
    ) -> Iterator[dict[str, Any]]:
        reader = self._reader(index)
        if is_first:
            yield _delta(index, {"role": "assistant", "content": ""})
        deltas = [_event_delta(event) for event in reader.read(chunk)]
        if chunk.logprobs or (with_token_ids and chunk.token_ids):
            # What belongs to tokens and not to text goes with the chunk's first piece.
            first = deltas.pop(0) if deltas else {}
            yield _delta(index, first, self._logprobs([chunk])) | _token_ids([chunk], with_token_ids)
        for delta in deltas:
            yield _delta(index, delta)
        if chunk.finish_reason is not None:
            reason = finish_reason_of(chunk, has_tool_calls=reader.has_tool_calls)
            yield _delta(index, {}) | {"finish_reason": reason}

    def _reader(self, index: int) -> ReplyReader:
        return self._readers.setdefault(index, ReplyReader(self._prompt))

    def _logprobs(self, chunks: Sequence[GenerateChunk]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = [
            self._token(logprob.token_id, logprob.logprob)
            | {"top_logprobs": [self._token(*alternative) for alternative in logprob.top]}
            for chunk in chunks
            for logprob in chunk.logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(token_id)
        # Part of a character has no text of its own.
        utf8 = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": utf8}


class _Message:
    """An assistant's message as its events come."""

    def __init__(self) -> None:
        self._reasoning = ""
        self._content = ""
        self._calls: list[dict[str, Any]] = []

    def add(self, event: ReplyEvent) -> None:
        match event:
            case ReasoningText(text):
                self._reasoning += text
            case ContentText(text):
                self._content += text
            case ToolCallBegin(_, name):
                self._calls.append(_begun_call(name))
            case ToolCallArguments(index, text):
                self._calls[index]["function"]["arguments"] += text

    def to_dict(self) -> dict[str, Any]:
        content = None if self._calls and not self._content else self._content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message


def _begun_call(name: str) -> dict[str, Any]:
    return {"id": new_call_id(), "type": "function", "function": {"name": name, "arguments": ""}}


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _event_delta(event: ReplyEvent) -> dict[str, Any]:
    match event:
        case ReasoningText(text):
            return {"reasoning_content": text}
        case ContentText(text):
            return {"content": text}
        case ToolCallBegin(index, name):
            return {"tool_calls": [{"index": index, **_begun_call(name)}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


class CompletionFormat:
    """Choices of /v1/completions. `echoes` are put before the texts of their choices."""

    whole_object = "text_completion"
    chunk_object = "text_completion"
    num_reasoning_tokens = 0

    def __init__(self, tokenizer: Tokenizer, *, echoes: Sequence[str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._num_characters: dict[int, int] = {}  # sent so far, by choice

    def whole(self, index: int, chunks: list[GenerateChunk], *, with_token_ids: bool) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": self._echo(index) + "".join(chunk.text for chunk in chunks),
            "logprobs": self._logprobs(index, [logprob for chunk in chunks for logprob in chunk.logprobs]),
            "finish_reason": finish_reason_of(chunks[-1]),
        }
        return choice | _token_ids(chunks, with_token_ids)

    def deltas(
        self, index: int, chunk: GenerateChunk, *, is_first: bool, with_token_ids: bool
    ) -> Iterator[dict[str, Any]]:
        text = (self._echo(index) if is_first else "") + chunk.text
        piece = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, chunk.logprobs),
            "finish_reason": finish_reason_of(chunk),
        }
        if text or chunk.logprobs or chunk.finish_reason is not None or with_token_ids:
            yield piece | _token_ids([chunk], with_token_ids)

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index]

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        tokens = [self._tokenizer.token_text(logprob.token_id) for logprob in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._num_characters.setdefault(index, 0))
            self._num_characters[index] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [logprob.logprob for logprob in logprobs],
            "top_logprobs": [
                {self._tokenizer.token_text(token_id): value for token_id, value in logprob.top}
                for logprob in logprobs
            ],
            "text_offset": offsets,
        }


def _token_ids(chunks: Sequence[GenerateChunk], is_wanted: bool) -> dict[str, list[int]]:
    if not is_wanted:
        return {}
    return {"token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids]}
