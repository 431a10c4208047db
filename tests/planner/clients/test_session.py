"""The session client on our engine, with a tiny random model whose every reply is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.engine.api import EngineError, FinishReason, GenerateResult, RecallMode
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.engine import Engine
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.planner.clients.session import SessionClient
from dayshift.planner.errors import PlannerCallError
from dayshift.planner.memory import MemoryArm
from dayshift.planner.protocol import COMMAND_SCHEMA, SYSTEM_PROMPTS
from dayshift.planner.rules import Rules

RULES = Rules(max_command_tokens=12, max_review_tokens=16, planner_retry_delays_s=(0.0,))
SYSTEM = SYSTEM_PROMPTS["compact"]
WINDOW = 400  # tokens; the byte tokenizer makes some 100 of a turn


def engine_config(model_dir: Path) -> EngineConfig:
    return EngineConfig(model=str(model_dir), device="cpu", load_format="dummy", kv_cache_bytes=1 << 24)


class EngineSessions:
    """The engine in this process as a `SessionApi`; can lose its sessions, and replies."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self.requests = []
        self.num_opened = 0
        self.replies_to_lose = 0
        self.restart()

    def restart(self) -> None:
        self.engine = Engine(
            EngineConfig(
                model=str(self._model_dir), device="cpu", load_format="dummy", kv_cache_bytes=1 << 24
            )
        )

    def open_session(self, config):
        self.num_opened += 1
        return self.engine.open_session(config)

    def session(self, session_id):
        return self.engine.session(session_id)

    def close_session(self, session_id):
        self.engine.close_session(session_id)

    def turn(self, request):
        self.requests.append(request)
        self.engine.submit(request)
        chunks = []
        while self.engine.has_work:
            chunks += self.engine.step()
        last = chunks[-1]
        if self.replies_to_lose:
            self.replies_to_lose -= 1
            raise EngineError("connection lost")
        return GenerateResult(
            request_id=request.request_id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(t for chunk in chunks for t in chunk.token_ids),
            finish_reason=last.finish_reason,
            ledger=last.ledger,
            num_prompt_tokens=last.num_prompt_tokens,
            recalled_turns=last.recalled_turns,
            present_turns=last.present_turns,
            not_fitting_turns=last.not_fitting_turns,
        )


@pytest.fixture
def engine(model_dir):
    return EngineSessions(model_dir)


@pytest.fixture
def run(rig, plan, engine):
    """Run (or resume, given a rig) an operation of two shifts on the engine."""

    def run(arm=MemoryArm.RECALL_KV, resumed=None):
        client = SessionClient(engine, arm=arm, system=SYSTEM, session_prefix="run-1", window=WINDOW)
        store = {"store": resumed.store} if resumed else {}
        r = rig(shifts=plan(2, 1, 2), planner=client, rules=RULES, **store)
        r.run()
        assert r.planner.session_id == "run-1-r0"
        return r

    return run


def session_turns(engine):
    return [(turn.at, turn.text) for turn in engine.session("run-1-r0").turns]


def answered(r):
    return [exchange.at for exchange in r.records.exchanges if not exchange.error]


def test_the_sessions_turns_are_the_answered_exchanges(engine, run):
    r = run()
    turns = session_turns(engine)
    assert [at for at, _ in turns] == answered(r)
    for (_, text), exchange in zip(turns, r.records.exchanges, strict=True):
        assert exchange.message in text
        assert exchange.reply in text
    assert engine.num_opened == 1
    assert {e.finish_reason for e in r.records.exchanges} == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("arm", "mode"),
    [
        (MemoryArm.RECALL_KV, RecallMode.KV),
        (MemoryArm.RECALL_TEXT, RecallMode.TEXT),
        (MemoryArm.WINDOW, RecallMode.OFF),
    ],
)
def test_arms(engine, run, arm, mode):
    r = run(arm)
    assert {request.recall_mode for request in engine.requests} == {mode}
    [review, _] = [e for e in r.records.exchanges if e.is_review and e.shift == 1]
    shift_1 = [e.index - 1 for e in r.records.exchanges if e.shift == 1 and not e.is_review]
    if mode is RecallMode.OFF:
        assert all(request.recall_range is None for request in engine.requests)
        assert review.recalled_turns == ()
    else:
        assert review.recalled_turns != ()
        asked_for = review.recalled_turns + review.present_turns + review.not_fitting_turns
        assert sorted(asked_for) == shift_1
    assert (review.ledger.recalled > 0) == (mode is RecallMode.KV)
    assert (review.ledger.recomputed > 0) == (mode is RecallMode.TEXT)


def test_only_the_new_turn_is_computed(run):
    r = run(MemoryArm.WINDOW)
    for exchange in r.records.exchanges[1:]:
        overhead = len("<|im_start|>user\n") + len("<|im_start|>assistant\n")
        assert exchange.ledger.computed <= len(exchange.message) + overhead
        assert exchange.ledger.reused > 0


def test_a_resumed_run_goes_on_with_the_same_session(engine, run):
    r = run()
    before = session_turns(engine)
    run(resumed=r)
    assert engine.num_opened == 1
    assert session_turns(engine) == before


def test_a_session_that_the_engine_lost_is_made_anew_from_the_records(engine, run):
    r = run()
    before = session_turns(engine)
    engine.restart()
    run(resumed=r)
    assert engine.num_opened == 2
    assert session_turns(engine) == before


def test_a_turn_that_was_answered_but_never_recorded_is_taken_back(engine, run):
    r = run()
    client = SessionClient(
        engine, arm=MemoryArm.RECALL_KV, system=SYSTEM, session_prefix="run-1", window=WINDOW
    )
    client.open("r0", r.records.exchanges[:-1])
    assert [at for at, _ in session_turns(engine)] == answered(r)[:-1]


def test_a_lost_reply_is_asked_for_again_and_its_turn_taken_once(engine, run):
    engine.replies_to_lose = 1
    r = run()
    first = r.records.exchanges[0]
    assert first.num_retries == 1
    assert engine.requests[0] == engine.requests[1]
    turns = session_turns(engine)
    assert [at for at, _ in turns] == answered(r)
    assert first.reply in turns[0][1]
    assert engine.num_opened == 1
    assert first.ledger.computed == first.ledger.generated == 0


def test_a_turn_whose_reply_was_lost_is_taken_back_when_another_question_follows(engine):
    client = SessionClient(engine, arm=MemoryArm.WINDOW, system=SYSTEM, session_prefix="run-1", window=WINDOW)
    client.open("r0", ())
    question = {"schema": COMMAND_SCHEMA, "max_tokens": 12}
    engine.replies_to_lose = 1
    with pytest.raises(PlannerCallError, match="connection lost"):
        client.ask("Result: done.", at=1.0, **question)
    client.ask("Result: failed.", at=2.0, **question)
    assert [at for at, _ in session_turns(engine)] == [2.0]
    assert engine.num_opened == 2


def test_an_engine_restarted_in_the_middle_of_a_run_is_given_the_conversation_again(engine, model_dir):
    client = SessionClient(engine, arm=MemoryArm.WINDOW, system=SYSTEM, session_prefix="run-1", window=WINDOW)
    client.open("r0", ())
    question = {"schema": COMMAND_SCHEMA, "max_tokens": 12}
    first = client.ask("Result: done.", at=1.0, **question)
    engine.restart()
    with pytest.raises(PlannerCallError, match="no session") as caught:
        client.ask("Result: done.", at=2.0, **question)
    assert caught.value.is_transient
    client.ask("Result: done.", at=2.0, **question)
    turns = session_turns(engine)
    assert [at for at, _ in turns] == [1.0, 2.0]
    assert first.text in turns[0][1]


def test_a_turn_that_can_never_fit_is_not_tried_again(engine):
    client = SessionClient(engine, arm=MemoryArm.WINDOW, system=SYSTEM, session_prefix="run-1", window=WINDOW)
    client.open("r0", ())
    with pytest.raises(PlannerCallError, match="does not fit") as caught:
        client.ask("x" * WINDOW, at=1.0, schema=COMMAND_SCHEMA, max_tokens=12)
    assert not caught.value.is_transient


def test_over_http_it_is_the_same_conversation(rig, plan, model_dir, run):
    here = run()
    options = ServerOptions(port=0, in_process=True)
    with running_server(engine_config(model_dir), options) as url, DayshiftClient(url) as engine:
        client = SessionClient(
            engine, arm=MemoryArm.RECALL_KV, system=SYSTEM, session_prefix="run-1", window=WINDOW
        )
        there = rig(shifts=plan(2, 1, 2), planner=client, rules=RULES)
        there.run()
        assert [at for at, _ in session_turns(engine)] == answered(there)
        client.open("r0", there.records.exchanges[:-1])
        assert [at for at, _ in session_turns(engine)] == answered(there)[:-1]
    for ours, theirs in zip(here.records.exchanges, there.records.exchanges, strict=True):
        assert (theirs.message, theirs.reply, theirs.problem) == (ours.message, ours.reply, ours.problem)
        assert theirs.ledger.computed == ours.ledger.computed
        assert theirs.recalled_turns == ours.recalled_turns


def test_an_engine_that_is_gone_is_asked_again_later(model_dir):
    with running_server(engine_config(model_dir), ServerOptions(port=0, in_process=True)) as url:
        pass
    with DayshiftClient(url) as engine:
        client = SessionClient(engine, arm=MemoryArm.WINDOW, system=SYSTEM, session_prefix="run-1")
        with pytest.raises(PlannerCallError, match="no engine answers") as caught:
            client.open("r0", ())
    assert caught.value.is_transient
