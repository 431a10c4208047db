"""How chats and completions write a choice, whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from dayshift.engine.api import GenerateChunk, TokenLogprob
from dayshift.engine.server.openai_fields import finish_reason_of
from dayshift.engine.tokenizer import Tokenizer


class ReplyFormat(Protocol):
    """One of OpenAI's two ways to write choices."""

    whole_object: str
    chunk_object: str

    def whole(self, index: int, chunks: list[GenerateChunk], *, with_token_ids: bool) -> dict[str, Any]:
        """A finished choice from its chunks."""
        ...

    def deltas(
        self, index: int, chunk: GenerateChunk, *, is_first: bool, with_token_ids: bool
    ) -> Iterator[dict[str, Any]]:
        """The pieces that a chunk adds to a choice; the last one carries the finish reason."""
        ...


class ChatFormat:
    """Choices of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, with_logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs

    def whole(self, index: int, chunks: list[GenerateChunk], *, with_token_ids: bool) -> dict[str, Any]:
        content = "".join(chunk.text for chunk in chunks)
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": self._logprobs(chunks),
            "finish_reason": finish_reason_of(chunks[-1]),
        }
        return choice | _token_ids(chunks, with_token_ids)

    def deltas(
        self, index: int, chunk: GenerateChunk, *, is_first: bool, with_token_ids: bool
    ) -> Iterator[dict[str, Any]]:
        if is_first:
            delta = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if chunk.text or chunk.logprobs or (with_token_ids and chunk.token_ids):
            piece = {
                "index": index,
                "delta": {"content": chunk.text},
                "logprobs": self._logprobs([chunk]),
                "finish_reason": None,
            }
            yield piece | _token_ids([chunk], with_token_ids)
        if chunk.finish_reason is not None:
            yield {"index": index, "delta": {}, "logprobs": None, "finish_reason": finish_reason_of(chunk)}

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


class CompletionFormat:
    """Choices of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._num_characters: dict[int, int] = {}  # sent so far, by choice

    def whole(self, index: int, chunks: list[GenerateChunk], *, with_token_ids: bool) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": "".join(chunk.text for chunk in chunks),
            "logprobs": self._logprobs(index, [logprob for chunk in chunks for logprob in chunk.logprobs]),
            "finish_reason": finish_reason_of(chunks[-1]),
        }
        return choice | _token_ids(chunks, with_token_ids)

    def deltas(
        self, index: int, chunk: GenerateChunk, *, is_first: bool, with_token_ids: bool
    ) -> Iterator[dict[str, Any]]:
        piece = {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk.logprobs),
            "finish_reason": finish_reason_of(chunk),
        }
        if chunk.text or chunk.logprobs or chunk.finish_reason is not None or with_token_ids:
            yield piece | _token_ids([chunk], with_token_ids)

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
