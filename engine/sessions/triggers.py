"""Recall triggers (`on_match`): which are sound, and which a turn's text matches."""

from __future__ import annotations

from collections.abc import Iterable

import regex

from dayshift.engine.api import InvalidRequestError, MatchKind, OnMatch

_MAX_PATTERN = 1000  # characters
_MAX_SEARCH_S = 0.1  # some patterns take for ever on some texts


def check_triggers(rules: Iterable[OnMatch]) -> None:
    """Raises InvalidRequestError for a rule that can never be applied."""
    for rule in rules:
        if rule.match is MatchKind.SEMANTIC:
            _check_semantic(rule)
            continue
        if not rule.text:
            raise InvalidRequestError("on_match: text must not be empty")
        if (rule.range is not None) + (rule.last_n is not None) + rule.range_in_call != 1:
            raise InvalidRequestError(
                "on_match: exactly one of range, last_n and range_in_call has to be given"
            )
        if rule.similar_n is not None:
            raise InvalidRequestError("on_match: similar_n belongs to a semantic rule")
        if rule.last_n is not None and rule.last_n < 1:
            raise InvalidRequestError(f"on_match: last_n must be at least 1, not {rule.last_n}")
        if rule.match is MatchKind.REGEX:
            _check_pattern(rule.text)


def is_match(rule: OnMatch, text: str) -> bool:
    """Whether a turn's text matches a rule on text. Raises InvalidRequestError if that takes too long."""
    if rule.match is MatchKind.SUBSTRING:
        return rule.text in text
    try:
        return regex.search(rule.text, text, timeout=_MAX_SEARCH_S) is not None
    except TimeoutError as error:
        raise InvalidRequestError(
            f"on_match: the pattern {rule.text!r} takes longer than {_MAX_SEARCH_S} s on this turn"
        ) from error


def _check_semantic(rule: OnMatch) -> None:
    if rule.text or rule.range is not None or rule.last_n is not None or rule.range_in_call:
        raise InvalidRequestError("on_match: a semantic rule takes similar_n and min_score only")
    if rule.similar_n is None or rule.similar_n < 1:
        raise InvalidRequestError("on_match: a semantic rule needs similar_n, at least 1")
    if not -1 <= rule.min_score <= 1:
        raise InvalidRequestError(f"on_match: min_score must be between -1 and 1, not {rule.min_score}")


def _check_pattern(pattern: str) -> None:
    if len(pattern) > _MAX_PATTERN:
        raise InvalidRequestError(f"on_match: a pattern of {len(pattern)} characters; {_MAX_PATTERN} allowed")
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise InvalidRequestError(f"on_match: {pattern!r} is not a regular expression: {error}") from error
