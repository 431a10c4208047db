"""Session memory, simulated on turn lengths: which turns a call's context holds, in which order.

The rules are the engine's (`engine.api.SessionConfig`): whole turns leave the window at a turn
boundary, recalled ones first, then the oldest, from the high-water down to the low-water mark; a
recall puts the archived turns of a time range after the window and before the question, where they
stay, later turns behind them, until the next recall or compaction. The trained model must not depend
on the details, so several can be varied.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRules:
    """A session's memory. Sizes in tokens, `window` and `low_water` as in `SessionConfig`."""

    window: int
    low_water: float = 0.75
    recall_budget: int | None = None  # default: as many as the window
    is_recall_kept: bool = True  # False: recalled turns leave when their call ends
    recall_margin: int = 0  # turns recalled beyond either end of the asked range


@dataclass(frozen=True, slots=True)
class Context:
    """What one call sees, turns by index: system prompt, `order`, then its own turn."""

    window: tuple[int, ...]  # ascending
    recalled: tuple[int, ...]  # ascending
    turn: int
    asked_at: int  # the turn whose call put the recalled turns where they are

    @property
    def order(self) -> tuple[int, ...]:
        """The visible turns as they lie: those since the recall come after what it recalled."""
        split = bisect_left(self.window, self.asked_at)
        return self.window[:split] + self.recalled + self.window[split:]

    def has_range(self, start: int, end: int) -> bool:
        """Whether every turn in [start, end) is visible."""
        visible = set(self.window).union(self.recalled)
        return all(index in visible for index in range(start, end))


class SessionMemory:
    """Feed it turn after turn; it answers with each call's `Context`."""

    def __init__(self, rules: MemoryRules, *, num_system_tokens: int, turn_lengths: Sequence[int]) -> None:
        self._rules = rules
        self._lengths = turn_lengths
        self._num_tokens = num_system_tokens  # in the window, recalled turns excluded
        self._first = 0  # window = [_first, _next)
        self._next = 0
        self._recalled: list[int] = []
        self._asked_at = 0

    def call(self, recall: tuple[int, int] | None = None) -> Context:
        """The context of the next turn; `recall` is a half-open range of turn indices."""
        rules, turn = self._rules, self._next
        if self._num_tokens + self._lengths[turn] > rules.window:
            self._compact(self._lengths[turn])
        if not rules.is_recall_kept:
            self._recalled = []
        if recall is not None:
            self._recall(max(0, recall[0] - rules.recall_margin), recall[1] + rules.recall_margin)
        context = Context(tuple(range(self._first, turn)), tuple(self._recalled), turn, self._asked_at)
        self._num_tokens += self._lengths[turn]
        self._next += 1
        return context

    def _compact(self, num_new_tokens: int) -> None:
        self._recalled = []
        rules = self._rules
        target = min(rules.window * rules.low_water, rules.window - num_new_tokens)
        while self._first < self._next and self._num_tokens > target:
            self._num_tokens -= self._lengths[self._first]
            self._first += 1

    def _recall(self, start: int, end: int) -> None:
        """Put archived turns of [start, end) back; earlier recalled turns make room if needed."""
        budget = self._rules.window if self._rules.recall_budget is None else self._rules.recall_budget
        asked: list[int] = []
        for index in range(start, min(end, self._first)):
            if self._lengths[index] > budget:
                break  # oldest first: what follows does not fit either
            budget -= self._lengths[index]
            asked.append(index)
        others = [index for index in self._recalled if index not in set(asked)]
        while others and sum(self._lengths[index] for index in others) > budget:
            others.pop(0)
        recalled = sorted(asked + others)
        if recalled != self._recalled:
            self._recalled, self._asked_at = recalled, self._next
