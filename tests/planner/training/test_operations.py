"""Synthetic operations and the simulated session memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from dayshift.planner import protocol
from dayshift.planner.training.memory import MemoryRules, SessionMemory
from dayshift.planner.training.operations import (
    Operation,
    OperationShape,
    TurnKind,
    make_operation,
    random_shape,
)
from dayshift.planner.training.wording import LIBERO_SENTENCES, any_sentence, held_out_sentence

seeds = st.integers(0, 2**32)


def training_operation(seed: int, *, max_turns: int = 60) -> Operation:
    rng = Random(seed)
    return make_operation(rng, random_shape(rng, max_turns=max_turns))


@given(seeds)
def test_taught_replies_are_commands_of_the_protocol(seed: int):
    for turn in training_operation(seed).turns:
        if turn.kind is TurnKind.REVIEW:
            assert protocol.format_reply(protocol.parse_review(turn.reply)) == turn.reply
        elif turn.kind is TurnKind.ACTION:
            assert protocol.format_reply(protocol.parse_command(turn.reply)) == turn.reply


@given(seeds)
def test_a_review_lists_exactly_what_was_given_up_in_the_hours_of_its_shift(seed: int):
    operation = training_operation(seed)
    for turn in operation.turns:
        if turn.kind is not TurnKind.REVIEW:
            continue
        start, end = operation.hours[turn.shift]
        replies = [t.reply for t in operation.turns[start:end] if t.kind is TurnKind.ACTION]
        commands = [protocol.parse_command(reply) for reply in replies]
        given_up = [command for command in commands if isinstance(command, protocol.GiveUp)]
        assert all(command.key.shift == turn.shift for command in given_up)
        listed = protocol.parse_review(turn.reply).steps
        assert listed == tuple((c.key.job, c.key.step, c.task) for c in given_up)
        assert list(listed) == sorted(listed, key=lambda item: item[:2])


@given(seeds)
def test_no_shift_is_reviewed_twice_or_before_it_has_ended(seed: int):
    operation = training_operation(seed)
    reviewed = [
        (turn.shift, index) for index, turn in enumerate(operation.turns) if turn.kind is TurnKind.REVIEW
    ]
    assert sorted(shift for shift, _ in reviewed) == sorted(operation.hours)
    assert all(index >= operation.hours[shift][1] for shift, index in reviewed)


def test_an_operation_depends_on_its_seed_alone():
    assert training_operation(5) == training_operation(5)
    assert training_operation(5) != training_operation(6)


def test_all_libero_sentences_and_no_held_out_word_occur_in_training():
    rng = Random(0)
    sentences = {any_sentence(rng) for _ in range(3000)}
    assert set(LIBERO_SENTENCES) <= sentences
    first_words = {sentence.split()[0] for sentence in sentences}
    assert not first_words & {held_out_sentence(rng).split()[0] for _ in range(200)}


@given(
    seed=seeds,
    window=st.integers(150, 3000),
    low_water=st.sampled_from((0.3, 0.5, 0.75, 1.0)),
    recall_budget=st.one_of(st.none(), st.integers(50, 1000)),
    is_recall_kept=st.booleans(),
)
def test_contexts_keep_to_the_memory_rules(
    seed: int, window: int, low_water: float, recall_budget: int | None, is_recall_kept: bool
):
    rng = Random(seed)
    num_turns, num_system = 80, 20
    lengths = [rng.randint(10, 60) for _ in range(num_turns)]
    rules = MemoryRules(
        window=window, low_water=low_water, recall_budget=recall_budget, is_recall_kept=is_recall_kept
    )
    memory = SessionMemory(rules, num_system_tokens=num_system, turn_lengths=lengths)
    budget = window if recall_budget is None else recall_budget
    before = 0
    for turn in range(num_turns):
        asked = None
        if rng.random() < 0.3:
            start = rng.randrange(turn + 1)
            asked = (start, rng.randint(start, turn))
        context = memory.call(asked)
        assert context.window == tuple(range(turn - len(context.window), turn))
        assert num_system + sum(lengths[i] for i in context.window) + lengths[turn] <= window
        assert sum(lengths[i] for i in context.recalled) <= budget
        assert list(context.recalled) == sorted(set(context.recalled))
        assert sorted(context.order) == sorted({*context.window, *context.recalled})
        first = turn - len(context.window)
        assert first >= before  # what has left comes back as a recalled turn only
        before = first
        if asked is not None:
            archived = [i for i in range(*asked) if i < first]
            if sum(lengths[i] for i in archived) <= budget:
                assert context.has_range(*asked)
                # right before the question, behind the whole window
                assert not archived or set(archived) <= set(context.recalled)


def test_recalled_turns_stay_in_place_while_later_turns_follow():
    memory = SessionMemory(MemoryRules(window=100, low_water=0.5), num_system_tokens=0, turn_lengths=[20] * 9)
    for _ in range(6):
        memory.call()
    context = memory.call((0, 2))
    assert context.order == (*context.window, 0, 1)
    following = memory.call()
    assert following.order == (*context.window, 0, 1, 6)


def test_only_the_asked_number_of_shifts_is_reviewed():
    shape = OperationShape(num_shifts=5)
    for num_reviews in (0, 2, 5):
        operation = make_operation(Random(1), replace(shape, num_reviews=num_reviews))
        shifts = [turn.shift for turn in operation.turns if turn.kind is TurnKind.REVIEW]
        assert shifts == list(range(1, num_reviews + 1))
