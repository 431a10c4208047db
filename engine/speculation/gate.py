"""Whether drafts pay: tokens per second with and without them, from steps that were timed here.

A verified step computes more tokens than it keeps. What that costs depends on the model (each token of a
mixture of experts may read other experts), the batch and the device, so it is measured while serving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2
from statistics import fmean, median

import numpy as np

MAX_DRAFTS = 7  # of a sequence in a step: with its last token they make eight
_CAPS = (1, 3, MAX_DRAFTS)
_MIN_GAIN = 1.03  # in tokens per second; less is noise
_NUM_PLAIN = 3  # steps that the time without drafts is taken from, before any is drafted
_TURN_AROUND = 128  # of so many decisions one is turned around, so that both times stay known
_NUM_KEPT = 5  # timed steps of about the same length


@dataclass(slots=True)
class _Timed:
    """The last steps of about the same number of tokens; their mean length and median time."""

    num_tokens: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_KEPT))
    point: tuple[float, float] = (0.0, 0.0)

    def add(self, num_tokens: int, seconds: float) -> None:
        self.num_tokens.append(num_tokens)
        self.seconds.append(seconds)
        self.point = fmean(self.num_tokens), median(self.seconds)


class StepTimes:
    """Seconds of a step by its number of tokens: decode steps (one token of each sequence), and others."""

    def __init__(self) -> None:
        self._decode: dict[int, _Timed] = {}
        self._other: dict[int, _Timed] = {}

    def record(self, num_tokens: int, seconds: float, *, is_decode: bool) -> None:
        """A step took so long."""
        self._table(is_decode).setdefault(_bucket(num_tokens), _Timed()).add(num_tokens, seconds)

    def is_known(self, num_tokens: int, *, is_decode: bool) -> bool:
        """Enough steps of about this many tokens were timed."""
        timed = self._table(is_decode).get(_bucket(num_tokens))
        return timed is not None and len(timed.seconds) >= _NUM_PLAIN

    def plain(self, num_tokens: int, *, is_decode: bool) -> float:
        """Seconds of a step without drafts, whose time is known."""
        return _interpolated(self._points(is_decode), num_tokens)

    def drafted(self, num_tokens: int, num_plain: int, plain_s: float) -> float:
        """Seconds of a step that drafts lengthen from `num_plain` tokens and `plain_s` seconds.

        What is longer than all that was timed counts as the longest: so it is tried, and timed.
        """
        longer = [point for point in self._points(is_decode=False) if point[0] > num_plain]
        return _interpolated([(num_plain, plain_s), *longer], num_tokens)

    def _table(self, is_decode: bool) -> dict[int, _Timed]:
        return self._decode if is_decode else self._other

    def _points(self, is_decode: bool) -> list[tuple[float, float]]:
        return sorted(timed.point for timed in self._table(is_decode).values())


@dataclass(frozen=True, slots=True)
class Candidate:
    """A draft: its number of tokens, and how likely each of them is right, below 1."""

    length: int
    rate: float

    def expected(self, cap: int) -> float:
        """Tokens that it adds to the step's own, if at most `cap` of it are verified."""
        return self.rate * (1 - self.rate ** min(self.length, cap)) / (1 - self.rate)


class DraftGate:
    """Chooses how many drafts of each sequence are verified in a step, and learns what steps take."""

    def __init__(self) -> None:
        self.times = StepTimes()
        self._num_decisions = 0
        self._num_plain_left = 0  # steps without drafts to time the steps without drafts
        self._is_trying = False  # the next drafts are verified to time it

    def choose(self, num_tokens: int, num_seqs: int, candidates: Sequence[Candidate]) -> int:
        """The most drafts of one sequence in a step that has `num_tokens` tokens without; 0: none."""
        is_decode = num_tokens == num_seqs
        if self._num_plain_left or not self.times.is_known(num_tokens, is_decode=is_decode):
            return 0
        cap = self._best_cap(num_tokens, num_seqs, candidates)
        self._num_decisions += 1
        if self._num_decisions % _TURN_AROUND == 0:
            if cap:
                self._num_plain_left = _NUM_PLAIN
                return 0
            self._is_trying = True
        return cap or (_CAPS[0] if self._is_trying else 0)

    def record(self, num_tokens: int, seconds: float, *, num_seqs: int, num_drafts: int) -> None:
        """A step of so many tokens, drafts included, took so long."""
        self.times.record(num_tokens, seconds, is_decode=num_tokens == num_seqs)
        if num_drafts:
            self._is_trying = False
        else:
            self._num_plain_left = max(0, self._num_plain_left - 1)

    def _best_cap(self, num_tokens: int, num_seqs: int, candidates: Sequence[Candidate]) -> int:
        plain_s = self.times.plain(num_tokens, is_decode=num_tokens == num_seqs)
        best_cap, best_rate = 0, _MIN_GAIN * num_seqs / plain_s
        for cap in _CAPS:
            num_drafts = sum(min(candidate.length, cap) for candidate in candidates)
            seconds = self.times.drafted(num_tokens + num_drafts, num_tokens, plain_s)
            rate = (num_seqs + sum(candidate.expected(cap) for candidate in candidates)) / seconds
            if rate > best_rate:
                best_cap, best_rate = cap, rate
        return best_cap


def _bucket(num_tokens: int) -> int:
    """Lengths that are taken together lie within a factor of the square root of two."""
    return int(2 * log2(num_tokens))


def _interpolated(points: Sequence[tuple[float, float]], num_tokens: int) -> float:
    lengths, seconds = zip(*points, strict=True)
    return float(np.interp(num_tokens, lengths, seconds))
