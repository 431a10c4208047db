"""Whether drafts pay: tokens per second with and without them, from steps that were timed here.

A verified step computes more tokens than it keeps. What that costs depends on the model (each token of a
mixture of experts may read other experts), the batch and the device, so it is measured while serving.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean, median

import numpy as np

MAX_DRAFTS = 7  # of a sequence in a step: with its last token they make eight
_CAPS = (1, 3, MAX_DRAFTS)
_MIN_GAIN = 1.03  # in tokens per second; less is noise
_NUM_PLAIN = 3  # steps that the time without drafts is taken from, before any is drafted
_TURN_AROUND = 128  # of so many decisions one is turned around, so that both times stay known
_MAX_MODEL_PAUSE = 4096  # decisions between two tries of a draft model
_NUM_KEPT = 5  # timed steps of about the same length
_NUM_STEPS_OF_CONTEXT = 16  # for which a context that a draft model computes is thought to be of use


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Drafts that a step may have. A draft model would have to make `num_made` of them, for contexts of which
    it does not know `num_behind` tokens yet."""

    candidates: Sequence[Candidate]
    num_made: int = 0
    num_behind: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The most drafts of one sequence, 0: none; and whether the draft model makes its part of them."""

    cap: int = 0
    has_made: bool = False


class DraftModelTimes:
    """Seconds that a draft model takes, by the number of sequences that it drafts for at once."""

    def __init__(self) -> None:
        self._rounds: dict[int, _Timed] = {}
        self._contexts = _Timed()

    def record(self, num_seqs: int, rounds_s: float, num_rounds: int) -> None:
        """So many tokens for each sequence took so long."""
        self._rounds.setdefault(_bucket(num_seqs), _Timed()).add(num_seqs, rounds_s / num_rounds)

    def record_contexts(self, num_tokens: int, seconds: float) -> None:
        """Computing tokens of contexts took so long."""
        self._contexts.add(num_tokens, seconds)

    def seconds(self, plan: Plan, cap: int) -> float:
        """Of making a plan's drafts, of `cap` tokens; infinite before anything was timed. Contexts that have
        to be computed before are of use for later steps, too, and count in part."""
        if plan.num_made == 0:
            return 0.0
        if not self._rounds:
            return math.inf
        points = sorted(timed.point for timed in self._rounds.values())
        num_tokens, contexts_s = self._contexts.point
        behind_s = contexts_s / num_tokens * plan.num_behind if num_tokens else 0.0
        return cap * _interpolated(points, plan.num_made) + behind_s / _NUM_STEPS_OF_CONTEXT


class DraftGate:
    """Chooses how many drafts of each sequence are verified in a step, and learns what steps take."""

    def __init__(self) -> None:
        self.times, self.model_times = StepTimes(), DraftModelTimes()
        self._num_decisions = 0
        self._num_plain_left = 0  # steps without drafts to time the steps without drafts
        self._is_trying = False  # the next drafts are verified to time it
        self._num_without_model = 0  # decisions, since it was chosen
        self._model_pause = _TURN_AROUND  # decisions until it is tried again; longer each time
        self._num_model_tries_left = 0  # steps for which it drafts to time it
        self._tried_sizes: set[int] = set()  # numbers of sequences for which it was tried

    def choose(
        self, num_tokens: int, num_seqs: int, candidates: Sequence[Candidate], made: Plan | None = None
    ) -> Choice:
        """For a step that has `num_tokens` tokens without drafts. `made`: what is drafted if the draft model
        makes some of the drafts, in place of `candidates`."""
        is_decode = num_tokens == num_seqs
        if self._num_plain_left or not self.times.is_known(num_tokens, is_decode=is_decode):
            return Choice()
        plans = [Plan(candidates)] if made is None else [Plan(candidates), made]
        best = self._best(num_tokens, num_seqs, plans)
        self._num_decisions += 1
        if self._num_decisions % _TURN_AROUND == 0:
            if best.cap:
                self._num_plain_left = _NUM_PLAIN
                return Choice()
            self._is_trying = True
        if best.has_made:
            self._model_pause = _TURN_AROUND
        elif made is not None and self._is_model_due(made):
            return Choice(_CAPS[0], has_made=True)
        return best if best.cap or not self._is_trying else Choice(_CAPS[0])

    def record(self, num_tokens: int, seconds: float, *, num_seqs: int, num_drafts: int) -> None:
        """A step of so many tokens, drafts included, took so long."""
        self.times.record(num_tokens, seconds, is_decode=num_tokens == num_seqs)
        if num_drafts:
            self._is_trying = False
        else:
            self._num_plain_left = max(0, self._num_plain_left - 1)

    def record_made(
        self, num_seqs: int, rounds_s: float, num_rounds: int, num_context_tokens: int, contexts_s: float
    ) -> None:
        """The draft model has made tokens for some sequences, or for none, and computed contexts before."""
        self._num_without_model = 0
        self._num_model_tries_left = max(0, self._num_model_tries_left - 1)
        if num_seqs:
            self.model_times.record(num_seqs, rounds_s, num_rounds)
        if num_context_tokens:
            self.model_times.record_contexts(num_context_tokens, contexts_s)

    def _best(self, num_tokens: int, num_seqs: int, plans: Sequence[Plan]) -> Choice:
        plain_s = self.times.plain(num_tokens, is_decode=num_tokens == num_seqs)
        best, best_rate = Choice(), _MIN_GAIN * num_seqs / plain_s
        for plan, cap in product(plans, _CAPS):
            num_drafts = sum(min(candidate.length, cap) for candidate in plan.candidates)
            seconds = self.times.drafted(num_tokens + num_drafts, num_tokens, plain_s)
            seconds += self.model_times.seconds(plan, cap)
            rate = (num_seqs + sum(candidate.expected(cap) for candidate in plan.candidates)) / seconds
            if rate > best_rate:
                best, best_rate = Choice(cap, has_made=plan.num_made > 0), rate
        return best

    def _is_model_due(self, made: Plan) -> bool:
        """The draft model is to be tried: for the first time with so many sequences, or after a while."""
        size = _bucket(made.num_made)
        self._num_without_model += 1
        is_over = self._num_without_model >= self._model_pause
        if is_over or size not in self._tried_sizes:
            self._tried_sizes.add(size)
            self._num_model_tries_left = _NUM_PLAIN
        if is_over:  # a try computes the contexts of all sequences, so that many would cost much
            self._num_without_model = 0
            self._model_pause = min(2 * self._model_pause, _MAX_MODEL_PAUSE)
        return self._num_model_tries_left > 0


def _bucket(num_tokens: int) -> int:
    """Lengths that are taken together lie within a factor of the square root of two."""
    return int(2 * math.log2(num_tokens))


def _interpolated(points: Sequence[tuple[float, float]], num_tokens: int) -> float:
    lengths, seconds = zip(*points, strict=True)
    return float(np.interp(num_tokens, lengths, seconds))
