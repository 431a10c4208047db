"""Tokenizer and chat template of a model folder, and the incremental detokeniser.

Reads tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and
config.json as they lie in a Hugging Face model folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from dayshift.engine.api import InvalidRequestError, Message
from dayshift.engine.chat_template import ChatTemplate
from dayshift.types import DayshiftError

_REPLACEMENT = "\ufffd"


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    Raises DayshiftError when the folder has no readable tokenizer.json. A folder without a chat
    template still serves plain completions; chats and sessions are then refused with a reason.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DayshiftError(
                f"{folder}: no tokenizer.json; a model folder in Hugging Face format is needed"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise DayshiftError(f"{path}: not a tokenizer ({error})") from error
        self._config = _read_json(folder / "tokenizer_config.json")
        self._special_tokens = _named_special_tokens(
            _read_json(folder / "special_tokens_map.json") | self._config
        )
        self.json_text = path.read_text(encoding="utf-8")
        self.eos_token_ids = self._read_eos_token_ids(folder)
        self._template = self._read_template(folder)
        self.session_refusal = self._find_session_refusal(folder)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. A model may have more rows than this."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of control tokens, which `decode` leaves out."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def reply_end(self) -> str:
        """What follows a reply in a session before the next turn; it begins with an eos token."""
        return self._chat_template.reply_end

    @cached_property
    def reply_end_token_ids(self) -> tuple[int, ...]:
        """Token ids of `reply_end`."""
        return tuple(self.encode(self.reply_end))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text are recognised.

        `add_special_tokens` adds what the model wants around a plain text, such as a BOS token;
        text rendered by the chat template holds these already.
        """
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special tokens written out, as log probabilities show it."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def stream_decoder(self) -> StreamDecoder:
        """A decoder for the tokens of one reply as they come."""
        return StreamDecoder(self)

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """See ChatTemplate.render_chat."""
        return self._chat_template.render_chat(messages, add_generation_prompt=add_generation_prompt)

    def render_system(self, system: str | None) -> str:
        """See ChatTemplate.render_system."""
        return self._chat_template.render_system(system)

    def render_turn(self, messages: Sequence[Message]) -> str:
        """See ChatTemplate.render_turn."""
        return self._chat_template.render_turn(messages)

    def render_past_turn(self, messages: Sequence[Message]) -> str:
        """See ChatTemplate.render_past_turn."""
        return self._chat_template.render_past_turn(messages)

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions")
        return self._template

    def _read_eos_token_ids(self, folder: Path) -> frozenset[int]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _read_json(folder / name).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        if (token := self._special_tokens.get("eos_token")) is not None:
            token_id = self._tokenizer.token_to_id(token)
            ids.update([] if token_id is None else [token_id])
        return frozenset(ids)

    def _read_template(self, folder: Path) -> ChatTemplate | None:
        path = folder / "chat_template.jinja"
        if path.is_file():
            return ChatTemplate(path.read_text(encoding="utf-8"), self._special_tokens, origin=str(path))
        source = self._config.get("chat_template")
        if isinstance(source, list):  # several templates by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        return ChatTemplate(source, self._special_tokens, origin=str(folder / "tokenizer_config.json"))

    def _find_session_refusal(self, folder: Path) -> str | None:
        """Why sessions are refused; None if turns can be appended, as text and as tokens."""
        if self._template is None:
            return f"{folder}: no chat template"
        if self._template.session_refusal is not None:
            return self._template.session_refusal
        turn = self.render_turn((Message("user", " a turn"),))
        parts = (self.render_system("be brief"), turn, "a reply", self.reply_end, turn)
        # The reply follows its turn as generated tokens, so only the other borders are checked.
        for group in (parts[:2], parts[2:]):
            if self.encode("".join(group)) != [i for part in group for i in self.encode(part)]:
                return f"{folder}: tokens merge across the border of two turns"
        if not self.eos_token_ids.intersection(self.reply_end_token_ids[:1]):
            return f"{folder}: the chat template does not end a reply with an eos token"
        return None


class StreamDecoder:
    """Decodes the tokens of one reply as they come.

    No piece ends inside a character, and the pieces joined, `finish` included, equal
    `Tokenizer.decode` of all tokens. (Where single bytes are tokens of their own, as in Llama 2, this
    holds for valid UTF-8 only: there one wrong byte spoils the whole run of bytes, those before it too.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens since the last border between characters but one: some decoders treat the first
        # token of a text specially, so one decoded piece is kept as context.
        self._window: list[int] = []
        self._num_context = 0  # tokens at the window's start that form the context
        self._num_emitted = 0  # characters of the window's text already returned

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        special = self._tokenizer.special_token_ids
        new = [token_id for token_id in token_ids if token_id not in special]
        if not new:
            return ""
        self._window.extend(new)
        text = self._tokenizer.decode(self._window)
        if text.endswith(_REPLACEMENT):  # most likely a character whose last bytes are to come
            return ""
        piece = text[self._num_emitted :]
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_emitted = len(self._tokenizer.decode(self._window))
        return piece

    def finish(self) -> str:
        """The rest, when no token follows: bytes of an unfinished character, as U+FFFD."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._num_emitted :]
        self._num_emitted = len(text)
        return piece


def _named_special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        match config.get(name):
            case str(text) | {"content": str(text)}:
                named[name] = text
    return named


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DayshiftError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise DayshiftError(f"{path}: expected a JSON object")
    return content
