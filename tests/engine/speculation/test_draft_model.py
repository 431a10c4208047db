"""A draft model: it follows the contexts that it drafts for, and changes no output however bad it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import SamplingParams
from dayshift.engine.block_pool import Context
from dayshift.engine.speculation.draft_model import DraftModel, open_draft_model
from dayshift.engine.speculation.gate import MAX_DRAFTS, DraftGate
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError
from tests.engine.driving import generate
from tests.engine.scripts import Call, play
from tests.engine.speculation.test_speculation import (
    check_same_outcomes,
    check_sessions_answer_the_same,
    make_engine,
    penalised,
    repetitive,
)

SMALL_KV_BYTES = 80 * 2 * 2 * 2 * 16 * 4  # 80 tokens of two layers with two heads of 16 values


@pytest.fixture(scope="module")
def other_model_dir(make_tiny_model: Callable[..., Path]) -> Path:
    """Two layers of other weights: it foretells nothing."""
    return make_tiny_model(seed=7, num_hidden_layers=2)


@pytest.fixture(scope="module")
def engines(tiny_model_dir: Path, other_model_dir: Path) -> Iterator[list[Engine]]:
    """One that never drafts; one whose draft model is always right, which runs ahead, too; one whose draft
    model is always wrong; and one where that has room for a few contexts, of which it sees the end."""
    made = [
        make_engine(tiny_model_dir, drafts=False),
        make_engine(tiny_model_dir, drafts=True, draft_model=str(tiny_model_dir), run_ahead=True),
        make_engine(tiny_model_dir, drafts=True, draft_model=str(other_model_dir)),
        make_engine(
            tiny_model_dir, drafts=True, draft_model=str(other_model_dir), draft_kv_bytes=SMALL_KV_BYTES
        ),
    ]
    yield made
    for engine in made:
        engine.close()


@given(script=st.lists(st.one_of(repetitive, penalised), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_every_answer_is_the_same(engines: list[Engine], script: list[Call]):
    plain, *others = (play(engine, script) for engine in engines)
    for drafted in others:
        check_same_outcomes(script, plain, drafted)
    for engine in engines:
        assert engine.pool.num_free == engine.pool.num_blocks
        engine.check_invariants()


@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_sessions_parked_recalled_and_forked_answer_the_same(engines: list[Engine], data: st.DataObject):
    check_sessions_answer_the_same(engines, data)


def test_all_drafts_of_the_model_itself_are_kept(engines: list[Engine]):
    plain, drafting = engines[:2]
    before = drafting.stats()
    for start in (20, 90):
        sampling = SamplingParams(max_tokens=100, ignore_eos=True)
        replies = [generate(engine, range(start, start + 60), sampling) for engine in (plain, drafting)]
        assert replies[0].token_ids == replies[1].token_ids
    after = drafting.stats()
    num_drafted = after.num_draft_model_tokens - before.num_draft_model_tokens
    assert num_drafted > 50
    assert after.num_accepted_draft_model_tokens - before.num_accepted_draft_model_tokens == num_drafted
    assert after.num_draft_model_context_tokens - before.num_draft_model_context_tokens >= 120
    assert after.num_drafted_tokens - before.num_drafted_tokens >= num_drafted


def test_the_gate_closes_where_the_draft_model_is_of_no_use(tiny_model_dir: Path, other_model_dir: Path):
    engine = make_engine(tiny_model_dir, drafts=True, draft_model=str(other_model_dir))
    engine.speculator.gate = DraftGate()
    sampling = SamplingParams(max_tokens=400, ignore_eos=True, temperature=50.0, seed=3)
    generate(engine, range(40), sampling)
    early = engine.stats().num_draft_model_tokens
    generate(engine, range(40), sampling)
    late = engine.stats().num_draft_model_tokens - early
    assert early > 0
    assert late < 40
    engine.close()


def test_ids_that_only_the_model_has_do_no_harm(make_tiny_model: Callable[..., Path], other_model_dir: Path):
    """Models of a family have different numbers of rows behind the same vocabulary."""
    folder = make_tiny_model(vocab_size=520)
    plain = make_engine(folder, drafts=False)
    drafting = make_engine(folder, drafts=True, draft_model=str(other_model_dir))
    sampling = SamplingParams(max_tokens=30, ignore_eos=True, logit_bias=((517, 3.0),))
    replies = [generate(engine, range(505, 520), sampling) for engine in (plain, drafting)]
    assert replies[0].token_ids == replies[1].token_ids
    assert drafting.stats().num_draft_model_tokens > 0


# --- the contexts that it follows --------------------------------------------------------------


def open_model(folder: Path, **fields: object) -> DraftModel:
    config = EngineConfig(model=str(folder), draft_model=str(folder), max_num_seqs=4, **fields)  # type: ignore[arg-type]
    model = open_draft_model(config, folder, Tokenizer(folder), max_step_tokens=2048)
    assert model is not None
    return model


@pytest.fixture(scope="module")
def models(other_model_dir: Path) -> tuple[DraftModel, DraftModel]:
    """One with room for about two contexts, and one with room for all."""
    num_bytes = 5 * SMALL_KV_BYTES // 2
    return open_model(other_model_dir, draft_kv_bytes=num_bytes), open_model(other_model_dir)


edits = st.tuples(
    st.integers(0, 2),  # the context
    st.integers(0, 90),  # tokens that it keeps
    st.lists(st.integers(0, 511), min_size=1, max_size=60),  # tokens that come then
    st.integers(1, MAX_DRAFTS),
)


@given(edits=st.lists(edits, min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_drafts_do_not_depend_on_what_was_computed_before(
    models: tuple[DraftModel, DraftModel], edits: list[tuple[int, int, list[int], int]]
):
    """Contexts grow, are cut and change; each draft is what a draft model that sees it first says."""
    small, large = models
    contexts = [Context() for _ in range(3)]
    for number, num_kept, token_ids, num_rounds in edits:
        context = contexts[number]
        context.token_ids = [*context.token_ids[:num_kept], *token_ids]
        (draft,) = small.propose([context], num_rounds).token_ids
        (fresh,) = large.propose([Context(list(context.token_ids))], num_rounds).token_ids
        assert len(draft) == num_rounds
        assert draft == fresh
        small.check()
    large.check()


def test_contexts_drafted_for_at_once_are_never_dropped_for_each_other(models: tuple[DraftModel, DraftModel]):
    small, large = models
    contexts = [Context([3 + number, *range(20, 100)]) for number in range(4)]
    expected = large.propose(contexts, 3).token_ids
    proposals = [small.propose(contexts, 3) for _ in range(3)]
    for proposal in proposals:
        assert [draft for draft in proposal.token_ids if draft] == expected[:2]
        assert proposal.num_drafted_for == 2
    assert proposals[-1].num_context_tokens == 0
    assert small.propose(contexts[2:], 3).token_ids == expected[2:]  # the first two are dropped for these
    small.check()


def test_a_long_context_is_seen_by_its_end_and_seldom_computed_again(other_model_dir: Path):
    model = open_model(other_model_dir, draft_kv_bytes=SMALL_KV_BYTES)
    context = Context([(7 * i) % 500 for i in range(300)])
    num_computed = 0
    for _ in range(100):
        proposals = model.propose([context], 2)
        assert len(proposals.token_ids[0]) == 2
        num_computed += proposals.num_context_tokens
        context.token_ids.append((11 * len(context.token_ids)) % 500)
    assert num_computed < 250
    model.check()


# --- what cannot be one ------------------------------------------------------------------------


def test_another_vocabulary_is_refused(tiny_model_dir: Path, other_model_dir: Path, tmp_path: Path):
    folder = tmp_path / "renamed"
    shutil.copytree(other_model_dir, folder)
    written = json.loads((folder / "tokenizer.json").read_text())
    vocab = written["model"]["vocab"]
    first, second = [token for token, token_id in vocab.items() if token_id in (40, 41)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(written))
    with pytest.raises(DayshiftError, match=r"another vocabulary: 512 tokens, and 2 of the model's 512"):
        make_engine(tiny_model_dir, drafts=True, draft_model=str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculation": "off"}, "draft_model is of no use with speculation off"),
        ({"draft_kv_bytes": 1000}, "draft_kv_bytes 1000 holds 0 tokens; 64 are needed"),
        ({"draft_model": "/nowhere/at-all"}, "model folder /nowhere/at-all does not exist"),
    ],
)
def test_what_cannot_draft_is_refused(tiny_model_dir: Path, fields: dict[str, object], message: str):
    with pytest.raises(DayshiftError, match=message):
        make_engine(tiny_model_dir, **{"drafts": True, "draft_model": str(tiny_model_dir)} | fields)  # type: ignore[arg-type]
