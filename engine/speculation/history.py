"""Drafts from what was said before: how did it go on, the last time that these tokens stood there?

An index of pairs of tokens to the places that follow them, as in prompt lookup decoding: a token costs
one entry, a draft looks at a bounded number of places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_MATCH = 16  # tokens; longer matches are not told apart
_MAX_PLACES = 16  # of a pair that are looked at, the newest


@dataclass(frozen=True, slots=True)
class Draft:
    """What may come next, and how many tokens before it are the same as where it was found."""

    token_ids: tuple[int, ...]
    match_length: int


class History:
    """Tokens in the order in which they were seen; the newest stand last.

    A place is the index of a token that followed others. Of those that followed the same pair only the
    newest is looked up; each names the one before it.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = list(token_ids)
        self._after_token = dict(zip(self._ids[:-1], range(1, len(self._ids)), strict=True))
        self._after_pair: dict[int, int] = {}
        self._earlier = [0] * min(2, len(self._ids))  # of each place; 0: none
        for place, (first, second) in enumerate(zip(self._ids, self._ids[1:-1], strict=False), start=2):
            pair = first << 32 | second
            self._earlier.append(self._after_pair.get(pair, 0))
            self._after_pair[pair] = place

    @property
    def num_tokens(self) -> int:
        return len(self._ids)

    def append(self, token_id: int) -> None:
        """One more token was seen."""
        place, earlier = len(self._ids), 0
        if place >= 1:
            self._after_token[self._ids[-1]] = place
        if place >= 2:
            pair = self._ids[-2] << 32 | self._ids[-1]
            earlier = self._after_pair.get(pair, 0)
            self._after_pair[pair] = place
        self._earlier.append(earlier)
        self._ids.append(token_id)

    def draft(self, num_tokens: int) -> Draft | None:
        """The next `num_tokens` tokens, as they followed the longest match among the newest places; None if
        the last token was never seen before."""
        ids = self._ids
        best = self._after_token.get(ids[-1]) if ids else None
        if best is None:
            return None
        length = 1
        for place in self._places():
            match_length = self._match_length(place)
            if match_length > length:
                best, length = place, match_length
                if length == MAX_MATCH:
                    break
        # Where the copy reaches the end of what is known, it goes on with itself.
        period = len(ids) - best
        return Draft(tuple(ids[best + i % period] for i in range(num_tokens)), length)

    def _places(self) -> Iterator[int]:
        """The newest places that followed the last two tokens."""
        if len(self._ids) < 2:
            return
        place = self._after_pair.get(self._ids[-2] << 32 | self._ids[-1], 0)
        for _ in range(_MAX_PLACES):
            if place == 0:
                return
            yield place
            place = self._earlier[place]

    def _match_length(self, place: int) -> int:
        """Tokens before `place` that equal the last ones; two do, as the index says."""
        ids, length = self._ids, 2
        while length < min(MAX_MATCH, place) and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        return length
