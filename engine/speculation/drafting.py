"""What is kept of a sequence, to draft for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dayshift.engine.speculation.history import Draft, History


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
