"""Recall triggers (`on_match`): which are sound, and which a turn's text matches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import re2

from dayshift.engine.api import InvalidRequestError, MatchKind, OnMatch, RecallRange

_MAX_TRIGGERS = 64
_MAX_PATTERN = 1000  # characters


def check_triggers(rules: Sequence[OnMatch]) -> None:
    """Raises InvalidRequestError for a rule that can never be applied, and for too many."""
    if len(rules) > _MAX_TRIGGERS:
        raise InvalidRequestError(f"triggers: {len(rules)} rules; {_MAX_TRIGGERS} allowed")
    for rule in rules:
        if rule.match is MatchKind.SEMANTIC:
            _check_semantic(rule)
            continue
        if not rule.text:
            raise InvalidRequestError("triggers: text must not be empty")
        if (rule.range is not None) + (rule.last_n is not None) + rule.range_in_call != 1:
            raise InvalidRequestError(
                "triggers: exactly one of range, last_n and range_in_call has to be given"
            )
        check_range(rule.range, "triggers: range")
        if rule.similar_n is not None:
            raise InvalidRequestError("triggers: similar_n belongs to a semantic rule")
        if rule.last_n is not None and rule.last_n < 1:
            raise InvalidRequestError(f"triggers: last_n must be at least 1, not {rule.last_n}")
        if rule.match is MatchKind.REGEX:
            _check_pattern(rule.text)


def check_range(asked: RecallRange | None, field: str) -> None:
    """Raises InvalidRequestError for a range that ends before it begins; `field` is its name."""
    if asked is not None and asked.end_s < asked.start_s:
        raise InvalidRequestError(f"{field}: ends at {asked.end_s:g}, before it begins at {asked.start_s:g}")


def is_match(rule: OnMatch, text: str) -> bool:
    """Whether a turn's text matches a rule on text. Raises InvalidRequestError if it is no sound pattern."""
    if rule.match is MatchKind.SUBSTRING:
        return rule.text in text
    return _search(rule.text)(text) is not None


def _check_semantic(rule: OnMatch) -> None:
    if rule.text or rule.range is not None or rule.last_n is not None or rule.range_in_call:
        raise InvalidRequestError("triggers: a semantic rule takes similar_n and min_score only")
    if rule.similar_n is None or rule.similar_n < 1:
        raise InvalidRequestError("triggers: a semantic rule needs similar_n, at least 1")
    if not -1 <= rule.min_score <= 1:
        raise InvalidRequestError(f"triggers: min_score must be between -1 and 1, not {rule.min_score}")


def _check_pattern(pattern: str) -> None:
    if len(pattern) > _MAX_PATTERN:
        raise InvalidRequestError(f"triggers: a pattern of {len(pattern)} characters; {_MAX_PATTERN} allowed")
    _search(pattern)


@lru_cache(maxsize=256)
def _search(pattern: str) -> Callable[[str], object | None]:
    """Searches a text for a pattern, with RE2: whatever the pattern, that takes bounded memory, and time in
    proportion to the text, so none can hold up the engine. It knows no look-around and no back-references."""
    options = re2.Options()
    options.log_errors = False  # they are raised
    try:
        return re2.compile(pattern, options).search
    except re2.error as error:
        reason = error.args[0].decode(errors="replace")
        raise InvalidRequestError(
            f"triggers: {pattern!r} is not a regular expression that RE2 takes: {reason}"
        ) from error
