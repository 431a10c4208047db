"""Random lives of a session in the store, against a plain list model."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dayshift.engine.api import (
    OnMatch,
    RecallRange,
)
from dayshift.engine.sessions.record_format import KV_CODECS, KV_DTYPES, PAGE_BYTES
from dayshift.engine.sessions.records import SYSTEM, KVPiece, LayoutRecord, SessionRecord, TurnRecord
from dayshift.engine.sessions.session_file import (
    StoreFullError,
)
from dayshift.engine.sessions.store import SessionStore
from tests.engine.store.samples import (
    IDENTITY,
    OTHER_IDENTITY,
    file_size_limit,
    make_piece,
    make_turn,
    path_of,
    same_piece,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
token_ids = st.lists(st.integers(0, 200_000), max_size=20).map(tuple)
turn_numbers = st.lists(st.integers(0, 50), max_size=4).map(tuple)
ranges = st.builds(RecallRange, st.floats(allow_nan=False, allow_infinity=False), st.just(1e9))
sessions = st.builds(
    SessionRecord,
    session_id=st.just("s"),
    system=st.none() | texts,
    system_token_ids=token_ids,
    window=st.integers(1, 2**40),
    high_water=st.floats(0, 1),
    low_water=st.floats(0, 1),
    recall_budget=st.integers(0, 2**40),
)
layouts = st.builds(
    LayoutRecord,
    window_turns=turn_numbers,
    recalled_turns=turn_numbers,
    triggers=st.lists(st.builds(OnMatch, text=texts, range=st.none() | ranges), max_size=2).map(tuple),
)


class StoreMachine(RuleBasedStateMachine):
    """Random life of one session; the model is a list of turns, a layout and a dict of pieces."""

    @initialize(session=sessions)
    def create(self, session: SessionRecord):
        self.folder = tempfile.TemporaryDirectory()
        self.store = SessionStore(Path(self.folder.name), IDENTITY)
        self.session = session
        self.turns: list[TurnRecord] = []
        self.layout: LayoutRecord | None = None
        self.pieces: dict[int, KVPiece] = {}
        self.file = self.store.create(session)

    def teardown(self):
        self.file.close()
        self.folder.cleanup()

    @rule(num_characters=st.sampled_from([0, 10, 3000, 5000]))
    def append_turn(self, num_characters: int):
        turn = make_turn(len(self.turns), num_characters)
        self.file.append_turn(turn)
        self.turns.append(turn)

    @rule(layout=layouts)
    def append_layout(self, layout: LayoutRecord):
        self.file.append_layout(layout)
        self.layout = layout

    @rule(
        data=st.data(),
        num_tokens=st.sampled_from([0, 1, 40, 90]),
        dtype=st.sampled_from(KV_DTYPES),
        codec=st.sampled_from(KV_CODECS),
    )
    def append_kv(self, data: st.DataObject, num_tokens: int, dtype: str, codec: str):
        turn = data.draw(st.integers(SYSTEM, len(self.turns) - 1))
        self.pieces[turn] = make_piece(num_tokens, dtype, turn + 1, codec)
        self.file.append_kv(turn, self.pieces[turn])

    @rule()
    def reopen(self):
        self.file.close()
        self.file = self.store.open("s")

    @rule(limit=st.integers(0, 5000), num_characters=st.sampled_from([10, 5000]))
    def fail_to_append_for_lack_of_space(self, limit: int, num_characters: int):
        end = path_of(self.store).stat().st_size
        turn = make_turn(len(self.turns), num_characters)
        # Less space than a page: not even the shortest record fits behind the padding.
        with file_size_limit(end + limit % PAGE_BYTES), pytest.raises(StoreFullError):
            self.file.append_turn(turn)
        assert path_of(self.store).stat().st_size <= -(-end // PAGE_BYTES) * PAGE_BYTES

    @rule(garbage=st.binary(min_size=1, max_size=9000))
    def die_in_the_middle_of_an_append(self, garbage: bytes):
        self.file.close()
        path = path_of(self.store)
        end = -(-path.stat().st_size // PAGE_BYTES) * PAGE_BYTES
        with path.open("r+b") as raw:
            raw.seek(end)
            raw.write(garbage)
        self.file = self.store.open("s")

    @invariant()
    def equals_the_model(self):
        assert self.file.session == self.session
        assert self.file.turns == self.turns
        assert self.file.layout == self.layout
        assert not self.file.has_foreign_tokens
        for turn in range(SYSTEM, len(self.turns)):
            assert self.file.has_kv(turn) == (turn in self.pieces)
            if turn in self.pieces:
                assert same_piece(self.file.read_kv(turn), self.pieces[turn])

    @rule()
    @precondition(lambda self: len(self.turns) > 0)
    def read_with_other_weights(self):
        self.file.close()
        with SessionStore(self.store.root, OTHER_IDENTITY).open("s") as file:
            assert file.turns == self.turns
            assert file.has_foreign_tokens
            assert not any(file.has_kv(turn) for turn in range(SYSTEM, len(self.turns)))
        self.file = self.store.open("s")


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)
