"""Decisions about a session's window, as properties over random sessions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.sessions.layout import CallPlan, Entry, WindowLimits, plan_call, youngest_fitting

SYSTEM = 10


@st.composite
def sessions(draw: st.DrawFn) -> tuple[list[int], list[Entry], WindowLimits, int, list[int], bool]:
    """Turn sizes, a reachable layout, limits, new tokens, asked turns, repeat."""
    sizes = draw(st.lists(st.integers(1, 60), max_size=12))
    window = draw(st.integers(100, 300))
    low = draw(st.floats(0.2, 1.0))
    high = draw(st.floats(low, 1.0))
    limits = WindowLimits(
        window=window, high_water=high, low_water=low, recall_budget=draw(st.integers(0, 200))
    )
    first = draw(st.integers(0, len(sizes)))
    recalled = draw(st.sets(st.integers(0, first - 1))) if first else set()
    while sum(sizes[turn] for turn in recalled) > limits.recall_budget:
        recalled.pop()
    entries = [Entry(turn) for turn in range(first, len(sizes))]
    entries += [Entry(turn, is_recalled=True) for turn in sorted(recalled)]
    asked = sorted(draw(st.sets(st.integers(0, len(sizes) - 1)))) if sizes else []
    num_new = draw(st.integers(1, int(window * high) - SYSTEM))
    return sizes, entries, limits, num_new, asked, draw(st.booleans())


def plan(case: tuple[list[int], list[Entry], WindowLimits, int, list[int], bool]) -> CallPlan:
    sizes, entries, limits, num_new, asked, repeat = case
    return plan_call(
        entries, sizes, limits, num_system=SYSTEM, num_new=num_new, asked=asked, repeat_present=repeat
    )


@given(sessions())
def test_window_and_budget_are_kept(case) -> None:
    sizes, entries, limits, num_new, _, _ = case
    result = plan(case)
    window = [entry.turn for entry in result.entries if not entry.is_recalled]
    recalled = [entry.turn for entry in result.entries if entry.is_recalled]
    used = SYSTEM + sum(sizes[turn] for turn in window)
    assert used + num_new <= limits.window * limits.high_water
    assert sum(sizes[turn] for turn in recalled) <= limits.recall_budget
    if result.archived:
        assert used <= limits.window * limits.low_water or not window
    # Whole turns, oldest first: what is left is the young end of what was there.
    before = [entry.turn for entry in entries if not entry.is_recalled]
    assert [*result.archived, *window] == before


@given(sessions())
def test_every_asked_turn_is_accounted_for_once(case) -> None:
    _, entries, _, _, asked, repeat = case
    result = plan(case)
    window = {entry.turn for entry in result.entries if not entry.is_recalled}
    recalled = {entry.turn for entry in result.entries if entry.is_recalled}
    assert len(set(result.entries)) == len(result.entries)
    assert set(result.present) == set(asked) & window
    wanted = set(asked) if repeat else set(asked) - window
    assert wanted == (wanted & recalled) | set(result.not_fitting)
    assert not recalled & set(result.not_fitting)
    before = {entry.turn for entry in entries if entry.is_recalled}
    assert set(result.recalled) == (wanted & recalled) - before
    assert set(result.kept) == wanted & recalled & before
    if not repeat:
        assert not recalled & window


@given(sessions())
def test_a_call_that_changes_nothing_keeps_the_order(case) -> None:
    sizes, entries, limits, _, _, _ = case
    used = SYSTEM + sum(sizes[entry.turn] for entry in entries if not entry.is_recalled)
    room = int(limits.window * limits.high_water) - used
    if room >= 1:
        assert plan((sizes, entries, limits, room, [], False)).entries == tuple(entries)


def test_compaction_clears_recalled_turns_first() -> None:
    limits = WindowLimits(window=100, high_water=1.0, low_water=0.5, recall_budget=100)
    entries = [Entry(2), Entry(3), Entry(0, is_recalled=True)]
    result = plan_call(entries, [20, 20, 40, 40], limits, num_system=SYSTEM, num_new=20)
    assert result.archived == (2,)
    assert result.entries == (Entry(3),)


def test_partly_present_range_brings_the_missing_part_only() -> None:
    limits = WindowLimits(window=200, high_water=1.0, low_water=0.5, recall_budget=100)
    entries = [Entry(2), Entry(3)]
    result = plan_call(entries, [20] * 4, limits, num_system=SYSTEM, num_new=20, asked=[1, 2])
    assert (result.recalled, result.present) == ((1,), (2,))
    assert result.entries == (Entry(2), Entry(3), Entry(1, is_recalled=True))


def test_recall_beyond_the_budget_takes_the_oldest_and_names_the_rest() -> None:
    limits = WindowLimits(window=200, high_water=1.0, low_water=0.5, recall_budget=50)
    result = plan_call([], [20] * 4, limits, num_system=SYSTEM, num_new=20, asked=[0, 1, 2, 3])
    assert (result.recalled, result.not_fitting) == ((0, 1), (2, 3))


@given(st.lists(st.integers(1, 60), max_size=20), st.integers(50, 300))
def test_unknown_layout_is_the_youngest_turns_below_low_water(sizes: list[int], window: int) -> None:
    limits = WindowLimits(window=window, high_water=1.0, low_water=0.75, recall_budget=0)
    turns = [entry.turn for entry in youngest_fitting(sizes, limits, SYSTEM)]
    assert turns == list(range(len(sizes) - len(turns), len(sizes)))
    used = SYSTEM + sum(sizes[turn] for turn in turns)
    assert used <= window * 0.75 or not turns
    if len(turns) < len(sizes):
        assert used + sizes[len(sizes) - len(turns) - 1] > window * 0.75
