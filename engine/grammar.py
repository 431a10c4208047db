"""Constrained output: which tokens may come next, through llguidance. No torch here.

`GrammarCompiler` makes matchers, one for each constrained request; an engine has it do so in `GrammarQueue`.
The output for a JSON schema is compact JSON (no optional whitespace), so replies stay short.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from textwrap import shorten
from typing import Any

import llguidance.numpy
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from dayshift.engine.api import InvalidRequestError, SamplingParams

_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
_MAX_REASON = 300  # characters: the library repeats what it does not understand
# Overrides what a schema's own "x-guidance" asks for; lenient would ignore unknown keywords.
_COMPACT = {
    "whitespace_flexible": False,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,
}


class GrammarMatcher:
    """Where one request's output stands in its grammar.

    Some grammars are found out only on the way: they need more work or room than the library allows. Such
    a matcher has failed for good, and `check` and `accept` raise; the masks, which other requests of a step
    wait for, never do.
    """

    def __init__(self, matcher: LLMatcher, num_words: int, name: str) -> None:
        self._matcher = matcher
        self._name = name  # of the request's field, for errors
        self._num_words = num_words
        self._failure: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can be added to it: generation ends.

        A value that could go on (the integer 12 may become 123) is complete once an eos token,
        allowed there, has been accepted.
        """
        return self._matcher.is_stopped()

    def allowed_mask(self) -> NDArray[np.int32]:
        """Tokens allowed next, (ceil(vocab_size / 32),) int32: bit i % 32 of word i // 32 is token i. All are
        where the matcher has failed."""
        mask = self._fill_mask()
        if self._matcher.is_error():
            self._failure = self._failure or self._reason()
            mask[:] = -1
        return mask

    def check(self) -> None:
        """Raise InvalidRequestError if the grammar could not be followed any more: what was drawn since then
        is not known to be right."""
        if self._failure is not None:
            raise InvalidRequestError(self._failure)

    def accept(self, token_id: int) -> None:
        """Move on by a generated token. Raises InvalidRequestError if the grammar does not allow it, or if it
        cannot be followed any more."""
        self.check()
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            self._failure = self._reason()
        self.check()

    def forced_text(self) -> str:
        """Text that has to come next, in whatever tokens; often none."""
        # On a copy: where a marker is forced, the library's matcher finds no token afterwards.
        return self._matcher.deep_copy().compute_ff_bytes().decode(errors="ignore")

    def allowed_part(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """As many of the tokens, from the first, as may follow without completing the output or leading
        to where no token is allowed."""
        ahead, num_allowed = self.copy(), 0
        for token_id in token_ids:
            if not ahead._matcher.try_consume_tokens([token_id]) or ahead.is_complete:
                break
            ahead._fill_mask()
            if ahead._matcher.is_error():
                break
            num_allowed += 1
        return tuple(token_ids[:num_allowed])

    def masks_along(self, token_ids: Sequence[int]) -> list[NDArray[np.int32]]:
        """`allowed_mask` now, and behind each of these tokens, which are allowed."""
        masks, ahead = [self.allowed_mask()], self.copy()
        for token_id in token_ids:
            ahead._matcher.consume_token(token_id)
            masks.append(ahead.allowed_mask())
        self._failure = self._failure or ahead._failure
        return masks

    def _fill_mask(self) -> NDArray[np.int32]:
        mask = np.empty((1, self._num_words), dtype=np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask)
        return mask[0]

    def copy(self) -> GrammarMatcher:
        """Another matcher at the same place."""
        # The library rolls back, too, but not in grammars with lexemes of limited length.
        return GrammarMatcher(self._matcher.deep_copy(), self._num_words, self._name)

    def _reason(self) -> str:
        return f"{self._name}: {_first_line(self._matcher.get_error())}"


def lark_of(sampling: SamplingParams) -> tuple[str, str]:
    """A request's schema or grammar, one of which is set, as a grammar, and its field's name for errors."""
    if sampling.json_schema is not None:
        return _lark_of_schema(sampling.json_schema), "json_schema"
    assert sampling.grammar is not None, "neither a schema nor a grammar"
    return sampling.grammar, "grammar"


def _lark_of_schema(schema: dict[str, Any]) -> str:
    try:
        return f"start: %json {json.dumps({**schema, 'x-guidance': _COMPACT})}"
    except RecursionError:
        raise InvalidRequestError("json_schema: it is nested too deeply") from None


class GrammarCompiler:
    """Compiles JSON schemas and grammars for one tokenizer, which may take for ever, or end the process.

    Args:
        tokenizer_json: content of the model's tokenizer.json.
        vocab_size: columns of the model's logits; ids beyond the tokenizer's are never allowed.
        eos_token_ids: tokens that end a reply; at least one.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        eos = sorted(eos_token_ids)
        if not eos:
            raise InvalidRequestError("json_schema: the model has no eos token to end a JSON reply with")
        self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=eos)
        self._num_words = -(-vocab_size // 32)

    def compile(self, schema: dict[str, Any]) -> GrammarMatcher:
        """A matcher at the start of a reply that must satisfy `schema`.

        Raises:
            InvalidRequestError: the schema is wrong, cannot be satisfied or uses a keyword that
                cannot be enforced.
        """
        return self.compile_text(_lark_of_schema(schema), "json_schema")

    def compile_lark(self, grammar: str) -> GrammarMatcher:
        """A matcher at the start of a reply that `grammar` describes from its rule `start` on.

        Raises:
            InvalidRequestError: the grammar is wrong or cannot be satisfied.
        """
        return self.compile_text(grammar, "grammar")

    def compile_text(self, lark: str, name: str) -> GrammarMatcher:
        """The same; `name` is the field that errors are about."""
        # Every tokenization of a valid reply is allowed. By default llguidance forces the bytes that a
        # schema fixes in tokens of its own choice, which a model has hardly ever seen: {"action": token by
        # token instead of the merged one that it was trained on.
        grammar = LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{lark}')
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        if is_error:
            raise InvalidRequestError(f"{name}: {_first_line(messages[0])}")
        matcher = GrammarMatcher(LLMatcher(self._tokenizer, grammar, log_level=0), self._num_words, name)
        # Some grammars pass as valid, and fail at their first token: rules that go round in circles.
        first = matcher.copy()
        first.allowed_mask()
        first.check()
        return matcher


def _first_line(message: str) -> str:
    """The library's reason without the position before it and the excerpt or state that follows it."""
    if message.startswith("panic"):  # one of its limits, met where it does not look for it
        return "it is too large to compile; make it smaller or simpler"
    reason = _EXCERPT.split(message.split("<state>")[0])[0]
    return shorten(" ".join(_POSITION.sub("", reason).split()), _MAX_REASON, placeholder=" ...")
