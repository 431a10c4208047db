"""Which turns a session's context holds, and what a call changes about it. Pure decisions.

A context is laid out as

    system prompt · window turns, oldest first · recalled turns, in time order · the new turn

Entries keep their places until a call compacts or recalls. No KV is touched here: because keys are
un-rotated, `context_builder` can put the entries together in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A turn in the context: in the window, or a recalled copy beside it."""

    turn: int
    is_recalled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowLimits:
    """A session's limits, in tokens. See `SessionConfig`."""

    window: int
    high_water: float
    low_water: float
    recall_budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """What a call does to the layout before its new turn is computed.

    `archived` leave the window now; `recalled` are put back by this call; `kept` were asked for, and an
    earlier call has put them back; `present` were asked for and are in the window; `not_fitting` were asked
    for and exceed the recall budget.
    """

    entries: tuple[Entry, ...]
    archived: tuple[int, ...] = ()
    recalled: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    not_fitting: tuple[int, ...] = ()


def plan_call(
    entries: Sequence[Entry],
    sizes: Sequence[int],
    limits: WindowLimits,
    *,
    num_system: int,
    num_new: int,
    asked: Sequence[int] = (),
    repeat_present: bool = False,
) -> CallPlan:
    """Plan a call that adds at most `num_new` tokens (prompt and reply) and asks for some turns.

    `sizes[i]` are the tokens of turn i; `asked` are ascending turn numbers. The caller has checked
    that system prompt and new tokens fit into the window.
    """
    window_turns = [entry.turn for entry in entries if not entry.is_recalled]
    recalled_before = [entry.turn for entry in entries if entry.is_recalled]
    archived = leaving_turns(window_turns, sizes, limits, num_system=num_system, num_new=num_new)
    window_turns = window_turns[len(archived) :]

    in_window = set(window_turns)
    present = [turn for turn in asked if turn in in_window]
    wanted = list(asked) if repeat_present else [turn for turn in asked if turn not in in_window]
    fitting = _within_budget(wanted, sizes, limits.recall_budget)

    # A compaction clears recalled turns first; otherwise they stay while the budget allows.
    kept = [turn for turn in recalled_before if turn not in wanted] if not archived else []
    room = limits.recall_budget - sum(sizes[turn] for turn in fitting)
    while sum(sizes[turn] for turn in kept) > room:
        kept.pop(0)

    recalled = sorted({*kept, *fitting})
    is_unchanged = not archived and recalled == sorted(recalled_before)
    return CallPlan(
        entries=tuple(entries)
        if is_unchanged
        else (*map(Entry, window_turns), *(Entry(turn, is_recalled=True) for turn in recalled)),
        archived=tuple(archived),
        recalled=tuple(turn for turn in fitting if turn not in recalled_before),
        kept=tuple(turn for turn in fitting if turn in recalled_before),
        present=tuple(present),
        not_fitting=tuple(turn for turn in wanted if turn not in fitting),
    )


def youngest_fitting(sizes: Sequence[int], limits: WindowLimits, num_system: int) -> tuple[Entry, ...]:
    """The layout of a session whose layout is not known: the youngest turns below the low water."""
    room = limits.window * limits.low_water - num_system
    first = len(sizes)
    while first > 0 and sizes[first - 1] <= room:
        first -= 1
        room -= sizes[first]
    return tuple(Entry(turn) for turn in range(first, len(sizes)))


def leaving_turns(
    window_turns: Sequence[int],
    sizes: Sequence[int] | Mapping[int, int],
    limits: WindowLimits,
    *,
    num_system: int,
    num_new: int,
) -> list[int]:
    """The oldest of the window's turns, as many as have to leave for `num_new` tokens; none below the high
    water. `sizes[i]` are the tokens of turn i."""
    used = num_system + sum(sizes[turn] for turn in window_turns)
    high = limits.window * limits.high_water
    if used + num_new <= high:
        return []
    target = min(limits.window * limits.low_water, high - num_new)
    leaving: list[int] = []
    for turn in window_turns:
        if used <= target:
            break
        leaving.append(turn)
        used -= sizes[turn]
    return leaving


def _within_budget(wanted: Sequence[int], sizes: Sequence[int], budget: int) -> list[int]:
    """The oldest of the wanted turns, up to the first one that no longer fits."""
    fitting: list[int] = []
    for turn in wanted:
        budget -= sizes[turn]
        if budget < 0:
            break
        fitting.append(turn)
    return fitting
