"""Tokenizer and chat template of a model, and the incremental detokeniser."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from dayshift.engine.api import ContextLengthExceededError, InvalidRequestError, Message
from dayshift.engine.chat_template import ChatTemplate
from dayshift.engine.models.formats import fallback_reason, is_gguf
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.models.gguf_tokenizer import read_gguf_tokenizer
from dayshift.engine.tokenizer_files import read_tokenizer_folder

_REPLACEMENT = "\ufffd"
_USUAL_CHARS = 8  # hardly any text has more to a token


class Tokenizer:
    """Text to token ids and back, and conversations to text.

    Of a folder as Hugging Face writes it, or a GGUF file; raises DayshiftError when there is no
    readable tokenizer in it. A model without a chat template still serves plain completions; chats
    and sessions are then refused with a reason.
    """

    def __init__(self, model: Path) -> None:
        parts = read_gguf_tokenizer(open_gguf(model)) if is_gguf(model) else read_tokenizer_folder(model)
        self._tokenizer = parts.tokenizer
        self.json_text = parts.tokenizer.to_str()
        self.eos_token_ids = parts.eos_token_ids
        self._template = None
        if parts.chat_template is not None:
            self._template = ChatTemplate(
                parts.chat_template, parts.special_tokens, origin=parts.template_origin
            )
        self.session_refusal = self._find_session_refusal(model)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. A model may have more rows than this."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token and its id, added ones included."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

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
        # `encode` would hold up every thread of the process until it is done.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoded.ids

    def encode_at_most(
        self, text: str, num_tokens: int, *, refusal: str, add_special_tokens: bool = False
    ) -> list[int]:
        """`encode`, of a text that is of no use with more tokens than this, though a few more may come.

        Megabytes take seconds, and hundreds of megabytes of memory, so a text that surely has twice as many
        is not encoded to its end. Raises ContextLengthExceededError, which says `refusal`, for it.
        """
        if len(text) > _USUAL_CHARS * num_tokens:
            step, num_found = max(1, 2 * num_tokens), 0
            for start in range(0, len(text), step):
                # A border between two pieces may split a token, hence the factor of two.
                num_found += len(self.encode(text[start : start + step]))
                if num_found > 2 * num_tokens:
                    raise ContextLengthExceededError(refusal)
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special tokens written out, as log probabilities show it."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """The id of the one token that is written `text`, special ones included; None if there is none."""
        return self._tokenizer.token_to_id(text)

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> StreamDecoder:
        """A decoder for the tokens of one reply as they come."""
        return StreamDecoder(self, skip_special_tokens=skip_special_tokens)

    @property
    def chat_template_source(self) -> str:
        """Jinja text of the chat template; empty if there is none."""
        return "" if self._template is None else self._template.source

    @property
    def chat_template_variables(self) -> frozenset[str]:
        """See ChatTemplate.variables."""
        return frozenset() if self._template is None else self._template.variables

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """See ChatTemplate.render_chat."""
        return self._chat_template.render_chat(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def render_system(self, system: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """See ChatTemplate.render_system."""
        return self._chat_template.render_system(system, tools)

    def render_turn(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """See ChatTemplate.render_turn."""
        return self._chat_template.render_turn(messages, variables)

    def render_past_turn(self, messages: Sequence[Message]) -> str:
        """See ChatTemplate.render_past_turn."""
        return self._chat_template.render_past_turn(messages)

    @property
    def session_tools_refusal(self) -> str | None:
        """Why sessions with tools are refused; None if they work."""
        return self.session_refusal or self._chat_template.session_tools_refusal

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise InvalidRequestError("this model has no chat template; use /v1/completions")
        return self._template

    def _find_session_refusal(self, model: Path) -> str | None:
        """Why sessions are refused; None if turns can be appended, as text and as tokens."""
        if (reason := fallback_reason(model)) is not None:
            return f"it runs on the transformers fallback, which keeps no sessions ({reason})"
        if self._template is None:
            return f"{model}: no chat template"
        if self._template.session_refusal is not None:
            return self._template.session_refusal
        turn = self.render_turn((Message("user", " a turn"),))
        parts = (self.render_system("be brief"), turn, "a reply", self.reply_end, turn)
        # The reply follows its turn as generated tokens, so only the other borders are checked.
        for group in (parts[:2], parts[2:]):
            if self.encode("".join(group)) != [i for part in group for i in self.encode(part)]:
                return f"{model}: tokens merge across the border of two turns"
        if not self.eos_token_ids.intersection(self.reply_end_token_ids[:1]):
            return f"{model}: the chat template does not end a reply with an eos token"
        return None


class StreamDecoder:
    """Decodes the tokens of one reply as they come.

    Special tokens are left out; with `skip_special_tokens` False, only eos tokens are. No piece ends
    inside a character, and the pieces joined, `finish` included, equal `Tokenizer.decode` of all tokens.
    (Where single bytes are tokens of their own, as in Llama 2, this holds for valid UTF-8 only: there
    one wrong byte spoils the whole run of bytes, those before it too.)
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else tokenizer.eos_token_ids
        # Tokens since the last border between characters but one: some decoders treat the first
        # token of a text specially, so one decoded piece is kept as context.
        self._window: list[int] = []
        self._num_context = 0  # tokens at the window's start that form the context
        self._num_emitted = 0  # characters of the window's text already returned

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        new = [token_id for token_id in token_ids if token_id not in self._skipped]
        if not new:
            return ""
        self._window.extend(new)
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT):  # most likely a character whose last bytes are to come
            return ""
        piece = text[self._num_emitted :]
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decode(self._window))
        return piece

    def finish(self) -> str:
        """The rest, when no token follows: bytes of an unfinished character, as U+FFFD."""
        text = self._decode(self._window)
        piece = text[self._num_emitted :]
        self._num_emitted = len(text)
        return piece

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)
