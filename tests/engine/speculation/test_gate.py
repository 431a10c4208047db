"""The gate drafts where tokens per second rise by it, and keeps both times known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dayshift.engine.speculation.gate import MAX_DRAFTS, Candidate, DraftGate

GOOD, POOR = Candidate(MAX_DRAFTS, 0.9), Candidate(MAX_DRAFTS, 0.05)


def play(
    gate: DraftGate, seconds: Callable[[int], float], candidate: Candidate, num_seqs: int, num_steps: int
) -> list[int]:
    """Steps of so many sequences that take `seconds` for their tokens; the drafts of each of them."""
    chosen: list[int] = []
    for _ in range(num_steps):
        cap = min(gate.choose(num_seqs, num_seqs, [candidate] * num_seqs), candidate.length)
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
    assert gate.choose(100, 3, [GOOD]) == MAX_DRAFTS
    assert gate.choose(3, 3, [GOOD]) == 0  # a decode step is another matter, and was not timed
