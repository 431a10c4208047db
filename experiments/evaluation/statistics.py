"""Intervals and tests for success rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

_Z95 = 1.959963984540054  # 97.5 % of the normal distribution


def wilson_interval(num_successes: int, num_trials: int) -> tuple[float, float]:
    """95 % score interval of a proportion (Wilson 1927); (0, 1) without trials."""
    if num_trials == 0:
        return 0.0, 1.0
    rate, z2 = num_successes / num_trials, _Z95**2
    centre = (rate + z2 / (2 * num_trials)) / (1 + z2 / num_trials)
    spread = math.sqrt(rate * (1 - rate) / num_trials + z2 / (4 * num_trials**2))
    half = _Z95 * spread / (1 + z2 / num_trials)
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two policies on the same tasks and initial states; `p_value` of McNemar's exact test, two-sided."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float


def mcnemar(pairs: list[tuple[bool, bool]]) -> PairedTest:
    """Compare (success of the first, success of the second) of each pair.

    Under the null hypothesis each discordant pair goes either way with probability 1/2, so the smaller
    count follows Binomial(discordant, 1/2).
    """
    only_first = sum(first and not second for first, second in pairs)
    only_second = sum(second and not first for first, second in pairs)
    both = sum(first and second for first, second in pairs)
    discordant, smaller = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, k) for k in range(smaller + 1)) / 2**discordant
    return PairedTest(
        both=both,
        only_first=only_first,
        only_second=only_second,
        neither=len(pairs) - both - discordant,
        p_value=min(1.0, 2 * tail),
    )
