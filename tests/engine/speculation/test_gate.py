"""The gate drafts where tokens per second rise by it, and keeps both times known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dayshift.engine.speculation.gate import MAX_DRAFTS, Candidate, Choice, DraftGate, Plan

GOOD, POOR = Candidate(MAX_DRAFTS, 0.9), Candidate(MAX_DRAFTS, 0.05)


def play(
    gate: DraftGate, seconds: Callable[[int], float], candidate: Candidate, num_seqs: int, num_steps: int
) -> list[int]:
    """Steps of so many sequences that take `seconds` for their tokens; the drafts of each of them."""
    chosen: list[int] = []
    for _ in range(num_steps):
        cap = min(gate.choose(num_seqs, num_seqs, [candidate] * num_seqs).cap, candidate.length)
        num_drafts = cap * num_seqs
        num_tokens = num_seqs + num_drafts
        gate.record(num_tokens, seconds(num_tokens), num_seqs=num_seqs, num_drafts=num_drafts)
        chosen.append(cap)
    return chosen


def test_nothing_is_drafted_before_the_time_without_is_known():
    assert play(DraftGate(), lambda _: 1.0, GOOD, num_seqs=2, num_steps=6) == [0, 0, 0, 7, 7, 7]


@pytest.mark.parametrize("num_seqs", [1, 8])
@pytest.mark.parametrize(
    ("seconds", "candidate", "does_pay"),
    [
        (lambda n: 1.0, GOOD, True),  # bound by the weights
        (lambda n: float(n), GOOD, False),  # bound by the tokens
        (lambda n: 1.0, POOR, True),  # a twentieth of a token more, for nothing
        (lambda n: 1.0 + 0.02 * n, POOR, False),
    ],
)
def test_drafts_are_verified_where_they_pay(
    seconds: Callable[[int], float], candidate: Candidate, does_pay: bool, num_seqs: int
):
    chosen = play(DraftGate(), seconds, candidate, num_seqs, 300)[50:]
    usual = max(set(chosen), key=chosen.count)
    assert (usual > 0) == does_pay
    if does_pay and candidate is GOOD:
        assert usual == MAX_DRAFTS


def test_a_gate_that_loses_tries_rarely():
    gate = DraftGate()
    chosen = play(gate, lambda n: float(n), GOOD, num_seqs=4, num_steps=2000)
    assert 0 < sum(cap > 0 for cap in chosen[100:]) <= 20


def test_a_change_of_the_machine_is_noticed():
    gate = DraftGate()
    slow = play(gate, lambda n: float(n), GOOD, num_seqs=4, num_steps=300)
    fast = play(gate, lambda n: 1.0, GOOD, num_seqs=4, num_steps=2000)
    slow_again = play(gate, lambda n: float(n), GOOD, num_seqs=4, num_steps=2000)
    assert slow[-1] == 0
    assert fast[-1] > 0
    assert slow_again[-1] == 0


def test_the_time_without_drafts_is_taken_again():
    """It has to be known although every step drafts."""
    chosen = play(DraftGate(), lambda _: 1.0, GOOD, num_seqs=4, num_steps=1000)
    assert 10 <= sum(cap == 0 for cap in chosen) <= 40


def test_a_step_beside_a_prompt_is_compared_with_such_steps():
    gate = DraftGate()
    for _ in range(5):
        gate.record(100, 1.0, num_seqs=3, num_drafts=0)
    assert gate.choose(100, 3, [GOOD]) == Choice(MAX_DRAFTS)
    assert gate.choose(3, 3, [GOOD]) == Choice()  # a decode step is another matter, and was not timed


def play_with_model(
    gate: DraftGate,
    *,
    round_s: float,
    candidate: Candidate = GOOD,
    found: Candidate | None = None,
    num_behind: int = 0,
    num_steps: int = 300,
) -> list[Choice]:
    """Steps of two sequences, each of which takes a second, beside what a draft model takes for a token of
    both; it computes 100 tokens of a context in a second."""
    chosen: list[Choice] = []
    for _ in range(num_steps):
        candidates = [] if found is None else [found] * 2
        choice = gate.choose(2, 2, candidates, Plan([candidate] * 2, num_made=2, num_behind=num_behind))
        num_drafts = 2 * choice.cap if choice.has_made or found is not None else 0
        if choice.has_made:
            gate.record_made(2, choice.cap * round_s, choice.cap, num_behind, num_behind / 100)
        gate.record(2 + num_drafts, 1.0, num_seqs=2, num_drafts=num_drafts)
        chosen.append(choice)
    return chosen


def test_a_draft_model_is_tried_as_soon_as_the_time_without_is_known():
    assert play_with_model(DraftGate(), round_s=0.01, num_steps=6) == [
        *[Choice()] * 3,
        Choice(1, has_made=True),
        *[Choice(MAX_DRAFTS, has_made=True)] * 2,
    ]


@pytest.mark.parametrize(
    ("round_s", "candidate", "found", "does_pay"),
    [
        (0.01, GOOD, None, True),
        (0.01, GOOD, POOR, True),  # better than what was found
        (0.9, GOOD, None, False),  # a draft costs what a step does
        (0.1, POOR, None, False),  # hardly ever right
        (0.2, GOOD, Candidate(MAX_DRAFTS, 0.85), False),  # what was found is as good, for nothing
    ],
)
def test_a_draft_model_drafts_where_that_pays_for_its_steps(
    round_s: float, candidate: Candidate, found: Candidate | None, does_pay: bool
):
    chosen = play_with_model(DraftGate(), round_s=round_s, candidate=candidate, found=found)[20:]
    num_made = sum(choice.has_made for choice in chosen)
    assert num_made > 250 if does_pay else 0 < num_made <= 10


@pytest.mark.parametrize(("num_behind", "does_pay"), [(200, True), (20_000, False)])
def test_contexts_that_a_draft_model_does_not_know_count(num_behind: int, does_pay: bool):
    chosen = play_with_model(DraftGate(), round_s=0.01, num_behind=num_behind)[20:]
    num_made = sum(choice.has_made for choice in chosen)
    assert num_made > 250 if does_pay else 0 < num_made <= 10


def test_a_draft_model_that_never_finds_room_does_not_stop_other_drafts():
    gate, good = DraftGate(), Candidate(MAX_DRAFTS, 0.9)
    chosen: list[Choice] = []
    for _ in range(100):
        choice = gate.choose(2, 2, [good] * 2, Plan([good] * 2, num_made=2))
        if choice.has_made:
            gate.record_made(0, 0.0, choice.cap, 0, 0.0)
        gate.record(2 + 2 * choice.cap, 1.0, num_seqs=2, num_drafts=2 * choice.cap)
        chosen.append(choice)
    assert sum(choice.has_made for choice in chosen) == 3
    assert chosen[-1] == Choice(MAX_DRAFTS)


def test_a_draft_model_of_no_use_is_tried_ever_more_rarely_until_it_is_of_use():
    gate = DraftGate()
    poor = play_with_model(gate, round_s=0.9, num_steps=4000)
    assert sum(choice.has_made for choice in poor[:2000]) <= 15
    assert sum(choice.has_made for choice in poor[2000:]) <= 6
    good = play_with_model(gate, round_s=0.01, num_steps=6000)
    assert good[-1] == Choice(MAX_DRAFTS, has_made=True)
