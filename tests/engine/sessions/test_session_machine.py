"""Random lives of sessions against a plain list model, with every token's KV checked.

The key of a token in the first layer depends on the token alone, and keys are un-rotated. So
whatever happened before, the first layer's key at each computed place of a context must be that of
the token that stands there: no turn may be lost, doubled, moved to another session or mixed up.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import RecallMode, SessionConfig, TurnState
from dayshift.engine.block_pool import Context
from dayshift.engine.kernels import reference
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.decoder import DecoderLayer
from dayshift.engine.sessions.restore_cost import PrefillTime, ReadTime, RestoreCost
from dayshift.engine.sessions.stored_piece import Tier
from tests.engine.driving import joined, run, take_turn, turn_request

NUM_BLOCKS = 40
HOST_BYTES = 1 << 19  # of half as many blocks: pieces go on to the archives
WINDOW = 160
WORDS = ("bowl", "plate", "stove", "drawer", "rack", "bottle")


def engine_config(
    folder: Path,
    *,
    num_kv_blocks: int = NUM_BLOCKS,
    host_kv_bytes: int = HOST_BYTES,
    store_dir: Path | None = None,
) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cpu",
        num_kv_blocks=num_kv_blocks,
        window=WINDOW,
        host_kv_bytes=host_kv_bytes,
        store_dir=store_dir,
        restore="read",
    )


@dataclass
class Model:
    """What a session should hold: its turns' times and texts; nothing is ever forgotten."""

    turns: list[tuple[float, str]] = field(default_factory=list)


class SessionMachine(RuleBasedStateMachine):
    folder: Path  # set by the test

    sessions = Bundle("sessions")

    def make_engine(self) -> Engine:
        return Engine(engine_config(self.folder))

    @initialize()
    def start(self) -> None:
        self.engine = self.make_engine()
        self.models: dict[str, Model] = {}
        self.clock = 0.0

    @rule(target=sessions, low_water=st.sampled_from([0.3, 0.75, 1.0]))
    def open(self, low_water: float) -> str:
        config = SessionConfig(system="Lead.", low_water=low_water, recall_budget=100)
        session_id = self.engine.open_session(config).session_id
        self.models[session_id] = Model()
        return session_id

    @rule(
        session_id=sessions,
        words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8),
        recall=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted).map(tuple),
        mode=st.sampled_from(RecallMode),
    )
    def take_turn(
        self, session_id: str, words: list[str], recall: tuple[int, int] | None, mode: RecallMode
    ) -> None:
        model = self.models[session_id]
        before = self.engine.session(session_id)
        request = turn_request(
            session_id, " ".join(words), self.clock, max_tokens=4, recall=recall, mode=mode
        )
        result = take_turn(self.engine, request)
        model.turns.append((self.clock, " ".join(words)))
        self.clock += 1.0

        ledger = result.ledger
        counted = ledger.computed + ledger.recomputed + ledger.reused + ledger.restored + ledger.recalled
        assert counted == result.num_prompt_tokens
        asked = set()
        if recall is not None and mode is not RecallMode.OFF:
            asked = {i for i, (at, _) in enumerate(model.turns[:-1]) if recall[0] <= at < recall[1]}
        after = {turn.index: turn.state for turn in self.engine.session(session_id).turns}
        assert set(result.present_turns) == {i for i in asked if after[i] is TurnState.WINDOW}
        recalled = {i for i in asked if after[i] is TurnState.RECALLED}
        assert asked == set(result.present_turns) | recalled | set(result.not_fitting_turns)
        newly = {i for i in recalled if before.turns[i].state is not TurnState.RECALLED}
        assert newly == set(result.recalled_turns)
        assert recalled - newly == set(result.kept_turns)

    @rule(session_ids=st.lists(sessions, min_size=1, max_size=4, unique=True))
    def take_turns_at_once(self, session_ids: list[str]) -> None:
        requests = {}
        for session_id in session_ids:
            request = turn_request(session_id, "all at once", self.clock, max_tokens=4)
            self.engine.submit(request)
            requests[request.request_id] = session_id
            self.models[session_id].turns.append((self.clock, "all at once"))
        self.clock += 1.0
        chunks = run(self.engine)
        assert all(joined(chunks[request_id]).token_ids for request_id in requests)

    @rule(session_id=sessions, num_steps=st.integers(0, 6))
    def cancel(self, session_id: str, num_steps: int) -> None:
        request = turn_request(session_id, "cancelled", self.clock, max_tokens=10)
        self.engine.submit(request)
        chunks = [chunk for _ in range(num_steps) for chunk in self.engine.step()]
        self.engine.cancel(request.request_id)
        run(self.engine)
        if any(chunk.finish_reason for chunk in chunks):  # drafts made it quicker than its cancellation
            self.models[session_id].turns.append((self.clock, "cancelled"))
            self.clock += 1.0

    @rule(session_ids=st.lists(sessions, min_size=1, max_size=4, unique=True), num_steps=st.integers(0, 6))
    def cancel_one_of_several(self, session_ids: list[str], num_steps: int) -> None:
        requests = [turn_request(s, "all but one", self.clock, max_tokens=4) for s in session_ids]
        for request in requests:
            self.engine.submit(request)
        chunks = [chunk for _ in range(num_steps) for chunk in self.engine.step()]
        answered = {chunk.request_id for chunk in chunks if chunk.finish_reason}
        self.engine.cancel(requests[0].request_id)
        self.engine.check_invariants()
        answered |= set(run(self.engine))
        for request in requests:
            if request is not requests[0] or request.request_id in answered:
                self.models[request.session_id].turns.append((self.clock, "all but one"))
        self.clock += 1.0

    @rule(session_id=sessions)
    def park(self, session_id: str) -> None:
        self.engine.park_session(session_id)

    @rule(target=sessions, session_id=sessions)
    def fork(self, session_id: str) -> str:
        branch = self.engine.fork_session(session_id).session_id
        self.models[branch] = Model(list(self.models[session_id].turns))
        return branch

    @rule(session_id=sessions)
    def prefetch(self, session_id: str) -> None:
        self.engine.prefetch_session(session_id)

    @rule(session_id=sessions)
    def lose_the_answer(self, session_id: str) -> None:
        """The same request again is answered from the record."""
        request = turn_request(session_id, "lost", self.clock, max_tokens=4)
        first = take_turn(self.engine, request)
        again = take_turn(self.engine, request)
        assert again.is_repeated
        assert again.token_ids == first.token_ids
        self.models[session_id].turns.append((self.clock, "lost"))
        self.clock += 1.0

    @rule(session_id=consumes(sessions))
    def close(self, session_id: str) -> None:
        self.engine.close_session(session_id)
        del self.models[session_id]

    @invariant()
    def the_engine_agrees_with_itself(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_invariants()

    @invariant()
    def every_key_is_its_tokens(self) -> None:
        if not hasattr(self, "engine"):
            return
        for session_id, model in self.models.items():
            info = self.engine.session(session_id)
            assert [(t.at, t.text.split("\n")[0]) for t in info.turns] == [
                (at, f"user: {text}") for at, text in model.turns
            ]
            assert info.num_window_tokens <= WINDOW
            assert info.num_recalled_tokens <= 100
            session = self.engine.session_manager.get(session_id)
            assert session.context.token_ids == session.layout_token_ids(session.entries)
            if not session.is_parked:
                self._check_keys(session.context)

    def _check_keys(self, context: Context) -> None:
        n = context.num_computed
        keys = self.engine.pool.read(context, 0, n)[0, 0]
        torch.testing.assert_close(keys, first_layer_keys(self.engine, context.token_ids[:n]))

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


class DroppingMachine(SessionMachine):
    """Files, host memory for a few turns, and no KV of a window that is worth a write."""

    num_dropped = 0  # in all lives

    def make_engine(self) -> Engine:
        self.store = tempfile.TemporaryDirectory()
        engine = Engine(
            engine_config(
                self.folder,
                num_kv_blocks=NUM_BLOCKS // 2,
                host_kv_bytes=HOST_BYTES // 8,
                store_dir=Path(self.store.name),
            )
        )
        slow, at_once = ReadTime(10.0, 0.0), PrefillTime(((1, 0.0), (100, 0.0)))
        engine.tiers.cost = RestoreCost({Tier.HOST: slow, Tier.ARCHIVE: slow}, at_once)
        return engine

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            DroppingMachine.num_dropped += self.engine.stats().num_dropped_kv_pieces
        super().teardown()
        if hasattr(self, "store"):
            self.store.cleanup()


def first_layer_keys(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Un-rotated keys of the first layer, computed from the tokens alone."""
    model, config = cast(ModelRunner, engine.runner).model, engine.model_config
    layer = cast(DecoderLayer, model.layers[0])
    assert layer.k_norm is not None
    with torch.inference_mode():
        hidden = model.embed(torch.tensor(token_ids, dtype=torch.int64))
        normed = reference.rms_norm(hidden, layer.input_norm, config.rms_norm_eps)
        num_heads = config.num_heads + 2 * config.num_kv_heads
        heads = layer.qkv_proj(normed).view(len(token_ids), num_heads, config.head_dim)
        keys = heads[:, config.num_heads : config.num_heads + config.num_kv_heads]
        return reference.rms_norm(keys, layer.k_norm, config.rms_norm_eps)


def run_machine(
    folder: Path, *, max_examples: int, num_steps: int, machine: type[SessionMachine] = SessionMachine
) -> None:
    class Case(machine):
        pass

    Case.folder = folder
    Case.TestCase.settings = settings(
        deadline=None,
        max_examples=max_examples,
        stateful_step_count=num_steps,
        suppress_health_check=[HealthCheck.filter_too_much],  # of sessions there are few
    )
    Case.TestCase("runTest").runTest()


def test_sessions_hold_what_a_plain_list_would(tiny_model_dir: Path) -> None:
    run_machine(tiny_model_dir, max_examples=12, num_steps=25)


def test_sessions_hold_it_where_kv_is_dropped(tiny_model_dir: Path) -> None:
    run_machine(tiny_model_dir, max_examples=10, num_steps=25, machine=DroppingMachine)
    assert DroppingMachine.num_dropped > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sessions_hold_what_a_plain_list_would_for_long(tiny_model_dir: Path) -> None:
    run_machine(tiny_model_dir, max_examples=150, num_steps=60)
