"""Against published values and against scipy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from dayshift.experiments.evaluation.statistics import mcnemar, wilson_interval


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts: tuple[int, int]) -> None:
    num_successes, num_trials = counts
    expected = binomtest(num_successes, num_trials).proportion_ci(method="wilson")
    assert wilson_interval(num_successes, num_trials) == pytest.approx(tuple(expected), abs=1e-9)


def test_wilson_without_trials_says_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_mcnemar_is_the_binomial_test_of_discordant_pairs(pairs: list[tuple[bool, bool]]) -> None:
    test = mcnemar(pairs)
    assert test.both + test.only_first + test.only_second + test.neither == len(pairs)
    discordant = test.only_first + test.only_second
    expected = 1.0 if discordant == 0 else binomtest(test.only_first, discordant).pvalue
    assert test.p_value == pytest.approx(expected, abs=1e-9)
