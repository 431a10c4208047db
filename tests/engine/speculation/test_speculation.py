"""An engine that drafts answers every request as one that does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import FinishReason, GenerateRequest, SamplingParams, SessionConfig
from dayshift.engine.speculation.gate import MAX_DRAFTS, Candidate, Choice, DraftGate, Plan
from tests.engine.driving import generate, run, take_turn, turn_request
from tests.engine.scripts import Call, Outcome, calls, play


class EveryDraft(DraftGate):
    """Drafts wherever there are any, of all lengths."""

    def __init__(self) -> None:
        super().__init__()
        self._caps = cycle((MAX_DRAFTS, 3, MAX_DRAFTS, 1))

    def choose(
        self, num_tokens: int, num_seqs: int, candidates: Sequence[Candidate], made: Plan | None = None
    ) -> Choice:
        return Choice(next(self._caps), has_made=made is not None)


def make_engine(folder: Path, *, drafts: bool, run_ahead: bool = False, **fields: object) -> Engine:
    config = EngineConfig(
        model=str(folder),
        num_kv_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        window=512,
        run_ahead=run_ahead,
        speculation="history" if drafts else "off",
        restore="read",
    )
    engine = Engine(replace(config, **fields))
    engine.speculator.gate = EveryDraft()
    return engine


@pytest.fixture(scope="module")
def engines(tiny_model_dir: Path) -> Iterator[list[Engine]]:
    """One that never drafts, one that does, and one that runs ahead where there is nothing to draft."""
    made = [
        make_engine(tiny_model_dir, drafts=False),
        make_engine(tiny_model_dir, drafts=True),
        make_engine(tiny_model_dir, drafts=True, run_ahead=True),
    ]
    yield made
    for engine in made:
        engine.close()


repetitive = st.builds(
    lambda call, pattern, num: replace(call, prompt=(pattern * num)[:70]),
    calls,
    st.lists(st.integers(3, 500), min_size=1, max_size=9),
    st.integers(1, 20),
)
penalised = st.builds(
    lambda call, penalty, bias: replace(
        call, sampling=replace(call.sampling, repetition_penalty=penalty, logit_bias=bias)
    ),
    repetitive,
    st.sampled_from([1.0, 1.2]),
    st.sampled_from([(), ((17, 3.0), (200, -5.0))]),
)


@given(script=st.lists(st.one_of(repetitive, repetitive, penalised), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_every_answer_is_the_same(engines: list[Engine], script: list[Call]):
    plain, *others = (play(engine, script) for engine in engines)
    for drafted in others:
        check_same_outcomes(script, plain, drafted)
    for engine in engines:
        assert engine.pool.num_free == engine.pool.num_blocks
        engine.check_invariants()


def check_same_outcomes(script: list[Call], plain: dict[str, Outcome], drafted: dict[str, Outcome]) -> None:
    for number, call in enumerate(script):
        expected, actual = plain[f"call-{number}"], drafted[f"call-{number}"]
        if call.cancel_after is None:
            assert actual == expected
            assert [entry.token_id for entry in actual.logprobs] == [
                entry.token_id for entry in expected.logprobs
            ]
            assert [entry.logprob for entry in actual.logprobs] == pytest.approx(
                [entry.logprob for entry in expected.logprobs], abs=1e-3
            )
        else:  # how far it came by its cancel is not specified
            length = min(len(actual.token_ids), len(expected.token_ids))
            assert actual.token_ids[:length] == expected.token_ids[:length]


def test_drafts_save_steps(engines: list[Engine]):
    plain, drafting, _ = engines
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    prompt = [5, 6, 7, 8] * 8
    steps: list[int] = []
    for engine in (plain, drafting):
        before = engine.stats()
        reply = generate(engine, prompt, replace(sampling, logit_bias=tuple((i, 50.0) for i in (5, 6))))
        assert len(reply.token_ids) == 100
        steps.append(engine.stats().num_steps - before.num_steps)
    stats = drafting.stats()
    assert steps[1] < 0.6 * steps[0]
    assert 0 < stats.num_accepted_draft_tokens <= stats.num_drafted_tokens
    assert plain.stats().num_drafted_tokens == 0


LIST = {"type": "array", "items": {"enum": ["drawer", "bowl"]}, "minItems": 4, "maxItems": 6}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_kept_and_its_forced_text_is_drafted(engines: list[Engine], temperature: float):
    plain, drafting, _ = engines
    for seed in range(8):
        sampling = SamplingParams(max_tokens=120, json_schema=LIST, temperature=temperature, seed=seed)
        first, second = (generate(engine, [9, 8, 7 + seed], sampling) for engine in (plain, drafting))
        assert second.token_ids == first.token_ids
        assert second.finish_reason is first.finish_reason is FinishReason.STOP


def test_an_output_never_exceeds_its_tokens(engines: list[Engine]):
    drafting = engines[1]
    for max_tokens in range(1, 12):
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logit_bias=((5, 90.0),))
        reply = generate(drafting, [5] * 20, sampling)
        assert reply.token_ids == (5,) * max_tokens
        assert reply.finish_reason is FinishReason.LENGTH


def test_a_chunk_with_a_stop_string_ends_at_it(engines: list[Engine]):
    """Tokens that were accepted behind the end are not part of the output, nor of the session."""
    for engine in engines:
        text = generate(engine, [5] * 20, SamplingParams(max_tokens=1, logit_bias=((70, 90.0),))).text
        sampling = SamplingParams(
            max_tokens=50, ignore_eos=True, logit_bias=((70, 90.0),), stop=(text * 9,), logprobs=0
        )
        engine.submit(GenerateRequest(request_id="r", prompt_token_ids=(70,) * 20, sampling=sampling))
        chunks = run(engine)["r"]
        assert [len(chunk.token_ids) for chunk in chunks] == [1] * 9
        assert sum(len(chunk.logprobs) for chunk in chunks) == 9
        assert "".join(chunk.text for chunk in chunks) == ""
        assert chunks[-1].finish_reason is FinishReason.STOP


@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_sessions_parked_recalled_and_forked_answer_the_same(engines: list[Engine], data: st.DataObject):
    """Rejected drafts leave nothing in a session's keys: it parks, compacts, recalls as if none had been."""
    check_sessions_answer_the_same(engines, data)


def check_sessions_answer_the_same(engines: Sequence[Engine], data: st.DataObject) -> None:
    num_turns = data.draw(st.integers(3, 7))
    texts = data.draw(
        st.lists(
            st.sampled_from(["put the bowl on the plate", "open the drawer. " * 3, "Result: done."]),
            min_size=num_turns,
            max_size=num_turns,
        )
    )
    parks = data.draw(st.lists(st.booleans(), min_size=num_turns, max_size=num_turns))
    recalls = data.draw(st.lists(st.booleans(), min_size=num_turns, max_size=num_turns))
    replies: list[list[tuple[int, ...]]] = []
    for engine in engines:
        engine.open_session(SessionConfig(session_id="s", system="You lead a robot.", window=192))
        said: list[tuple[int, ...]] = []
        for at, (text, is_parked, recalls_all) in enumerate(zip(texts, parks, recalls, strict=True)):
            if is_parked:
                engine.park_session("s")
            recall = (0.0, float(at)) if recalls_all else None
            said.append(
                take_turn(engine, turn_request("s", text, at, max_tokens=20, recall=recall)).token_ids
            )
        engine.fork_session("s", "fork")
        said.append(take_turn(engine, turn_request("fork", "again", 99.0, max_tokens=20)).token_ids)
        engine.close_session("fork")
        engine.close_session("s")
        engine.check_invariants()
        replies.append(said)
    for others in replies[1:]:
        assert others == replies[0]


def test_quantised_rows_are_overwritten_too(tiny_model_dir: Path):
    plain, drafting = (make_engine(tiny_model_dir, drafts=on, kv_cache_dtype="int8") for on in (False, True))
    sampling = SamplingParams(max_tokens=60, ignore_eos=True)
    for prompt in ([5, 6, 7] * 9, list(range(20, 60))):
        assert generate(plain, prompt, sampling).token_ids == generate(drafting, prompt, sampling).token_ids


def test_replies_of_archived_turns_are_drafted_from(tiny_model_dir: Path):
    """What the session said before it left the window is part of its history."""
    engine = make_engine(tiny_model_dir, drafts=True)
    engine.open_session(SessionConfig(session_id="s", window=128))
    for at in range(6):
        take_turn(engine, turn_request("s", f"turn {at}: put the bowl on the plate", at, max_tokens=16))
    session = engine.session_manager.get("s")
    archived = session.archived_turns()
    assert archived
    engine.submit(turn_request("s", "and now", 9.0, max_tokens=16))
    engine.step()
    engine.step()
    (sequence,) = engine.scheduler.running
    assert sequence.drafting is not None
    num_archived = sum(len(session.turns[turn].token_ids) for turn in archived)
    assert sequence.drafting.history.num_tokens >= num_archived + sequence.drafting.num_seen
    run(engine)
    engine.close()
