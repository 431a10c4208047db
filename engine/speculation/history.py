"""Drafts from what was said before: how did it go on, the last time that these tokens stood there?

An index of pairs of tokens to the places that follow them, as in prompt lookup decoding: a token costs
one entry, a draft looks at a bounded number of places.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_MATCH = 16  # tokens; longer matches are not told apart
_MAX_PLACES = 16  # of a pair that are looked at, the newest


@dataclass(frozen=True, slots=True)
class Draft:
    """What may come next, and how many tokens before it are the same as where it was found."""

    token_ids: tuple[int, ...]
    match_length: int


class History:
    """Tokens in the order in which they were seen; the newest stand last."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = list(token_ids)
        # Places that follow a pair, or a token: only such as have a token already.
        self._after_pair: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for place, pair in enumerate(zip(self._ids, self._ids[1:-1], strict=False), start=2):
            self._after_pair[pair].append(place)
        self._after_token = dict(zip(self._ids[:-1], range(1, len(self._ids)), strict=True))

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def append(self, token_id: int) -> None:
        """One more token was seen."""
        place = len(self._ids)
        if place >= 1:
            self._after_token[self._ids[-1]] = place
        if place >= 2:
            self._after_pair[self._ids[-2], self._ids[-1]].append(place)
        self._ids.append(token_id)

    def draft(self, num_tokens: int) -> Draft | None:
        """The next `num_tokens` tokens, as they followed the longest match among the newest places; None if
        the last token was never seen before."""
        ids = self._ids
        best = self._after_token.get(ids[-1]) if ids else None
        if best is None:
            return None
        length = 1
        for place in reversed(self._after_pair.get((ids[-2], ids[-1]), ())[-_MAX_PLACES:]):
            match_length = self._match_length(place)
            if match_length > length:
                best, length = place, match_length
                if length == MAX_MATCH:
                    break
        # Where the copy reaches the end of what is known, it goes on with itself.
        period = len(ids) - best
        return Draft(tuple(ids[best + i % period] for i in range(num_tokens)), length)

    def _match_length(self, place: int) -> int:
        """Tokens before `place` that equal the last ones; two do, as the index says."""
        ids, length = self._ids, 2
        while length < min(MAX_MATCH, place) and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        return length
