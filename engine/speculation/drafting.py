"""What is kept of a sequence, to draft for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dayshift.engine.speculation.history import MAX_MATCH, Draft, History

FORCED, MADE = 0, MAX_MATCH + 1
"""In place of a draft's match length: the grammar allows nothing else; the draft model has made it."""


@dataclass(slots=True)
class Rate:
    """A running share of right tokens; the newest count most."""

    num_right: float = 0.0
    num_judged: float = 0.0

    def add(self, is_right: bool, memory: float) -> None:
        """One more token was judged."""
        self.num_right = memory * self.num_right + is_right
        self.num_judged = memory * self.num_judged + 1


@dataclass(slots=True, eq=False)
class Drafting:
    """What is kept for one sequence. `draft` says what follows the first `num_seen` tokens of its context;
    the tokens that come judge it, whether it was verified or not."""

    history: History
    num_seen: int
    draft: Draft | None = None
    rate: Rate = field(default_factory=Rate)
    rate_made: Rate = field(default_factory=Rate)  # of the draft model's tokens

    def rate_of(self, match_length: int) -> Rate:
        """The sequence's own rate of such drafts."""
        return self.rate_made if match_length == MADE else self.rate
