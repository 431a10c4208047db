"""Drafts against a plain search for the longest match."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.speculation.history import MAX_MATCH, History

token_ids = st.lists(st.integers(0, 3), max_size=60)


def match_length(ids: list[int], place: int) -> int:
    """Tokens before `place` that equal the last ones."""
    length = 0
    while length < min(place, MAX_MATCH) and ids[place - 1 - length] == ids[len(ids) - 1 - length]:
        length += 1
    return length


@given(ids=token_ids, num_tokens=st.integers(1, 9))
def test_a_draft_follows_the_longest_match_of_the_newest_places(ids: list[int], num_tokens: int):
    draft = History(ids).draft(num_tokens)
    lengths = {place: match_length(ids, place) for place in range(1, len(ids))}
    pairs = sorted(place for place, length in lengths.items() if length >= 2)[-16:]
    singles = [place for place, length in lengths.items() if length >= 1]
    if not singles:
        assert draft is None
        return
    best = max(pairs, key=lambda place: (lengths[place], place)) if pairs else max(singles)
    assert draft is not None
    assert draft.match_length == lengths[best]
    known = list(ids)
    for i, token_id in enumerate(draft.token_ids):
        assert token_id == known[best + i]
        known.append(token_id)
    assert len(draft.token_ids) == num_tokens


@given(ids=token_ids, num_first=st.integers(0, 60))
def test_tokens_may_come_at_once_or_one_by_one(ids: list[int], num_first: int):
    history = History(ids[:num_first])
    for token_id in ids[num_first:]:
        history.append(token_id)
    assert history.draft(5) == History(ids).draft(5)
