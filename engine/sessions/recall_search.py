"""Which turns a call asks for: by its range, by triggers on text, and by what they are about."""

from __future__ import annotations

from dayshift.engine.api import OnMatch, RecallMode, TurnRequest
from dayshift.engine.sequence import Sequence
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.session import Session
from dayshift.engine.sessions.similarity import TurnSimilarity
from dayshift.engine.sessions.stored_piece import Tier

_NUM_AT_ONCE = 16  # turns whose KV is read to be compared


class RecallSearch:
    """Finds the turns that calls of sessions ask for."""

    def __init__(self, similarity: TurnSimilarity, tiers: KVTiers) -> None:
        self._similarity = similarity
        self._tiers = tiers

    def unread_turns(self, session: Session, sequence: Sequence) -> list[int]:
        """Turns whose KV has to be fetched from archives before `asked_turns` can compare them: some at a
        time, because their KV is not kept. Empty: nothing is missing."""
        if sequence.asked_turns is not None or not _semantic_rules(session, sequence):
            return []
        archived = session.archived_turns()
        new = [turn for turn in archived if turn in session.fetched and turn not in session.key_means]
        if new:
            self._similarity.learn(session, new)
            self._tiers.end_fetch(session)
        unknown = (turn for turn in archived if turn not in session.key_means)
        return [turn for turn in unknown if self._tiers.tier_of(session, turn) is Tier.ARCHIVE][:_NUM_AT_ONCE]

    def asked_turns(self, session: Session, sequence: Sequence) -> tuple[int, ...]:
        """The turns that a call asks for. They stay the same while it waits, and are found once."""
        request = sequence.request
        assert isinstance(request, TurnRequest), "a session's call"
        if request.recall_mode is RecallMode.OFF:
            return ()
        if sequence.asked_turns is None:
            asked = set(session.asked_turns(request))
            for rule, num in _semantic_rules(session, sequence):
                asked.update(
                    self._similarity.most_similar(
                        session,
                        session.archived_turns(),
                        sequence.new_token_ids,
                        num=num,
                        min_score=rule.min_score,
                    )
                )
            sequence.asked_turns = tuple(sorted(asked))
        return sequence.asked_turns


def _semantic_rules(session: Session, sequence: Sequence) -> list[tuple[OnMatch, int]]:
    """The session's rules that compare turns with a call, and how many turns each recalls."""
    request = sequence.request
    if isinstance(request, TurnRequest) and request.recall_mode is RecallMode.OFF:
        return []
    return [(rule, rule.similar_n) for rule in session.triggers if rule.similar_n is not None]
