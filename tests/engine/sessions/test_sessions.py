"""Sessions through the engine: window, archive, recall, parking, forks, ledgers, failures."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    FinishReason,
    GenerateResult,
    InvalidRequestError,
    Message,
    OnMatch,
    RecallMode,
    RecallPresent,
    RecallRange,
    SamplingParams,
    SessionBusyError,
    SessionConfig,
    SessionExistsError,
    SessionNotFoundError,
    TokenLedger,
    TurnRequest,
    TurnState,
)
from tests.engine.driving import generate, joined, run, take_turn, turn_request

SYSTEM = "You lead a robot."


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(model: Path = tiny_model_dir, **fields: Any) -> Engine:
        fields = {"num_kv_blocks": 256, "device": "cpu", "window": 1024, "restore": "read"} | fields
        engines.append(Engine(EngineConfig(model=str(model), **fields)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def open_session(engine: Engine, **fields: Any) -> str:
    settings: dict[str, Any] = {"system": SYSTEM} | fields
    return engine.open_session(SessionConfig(**settings)).session_id


def talk(engine: Engine, session_id: str, num_turns: int, start: int = 0) -> list[GenerateResult]:
    return [
        take_turn(engine, turn_request(session_id, f"Step {i}: put the bowl on plate {i}.", at=float(i)))
        for i in range(start, start + num_turns)
    ]


def num_prompt(ledger: TokenLedger) -> int:
    return ledger.computed + ledger.recomputed + ledger.reused + ledger.restored + ledger.recalled


def test_output_equals_one_fresh_full_context_request(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    results = talk(engine, open_session(engine), 8)
    tokenizer = engine.tokenizer
    tokens = tokenizer.encode(tokenizer.render_system(SYSTEM))
    for index, result in enumerate(results):
        message = Message("user", f"Step {index}: put the bowl on plate {index}.")
        tokens += tokenizer.encode(tokenizer.render_turn((message,)))
        assert result.num_prompt_tokens == len(tokens)
        fresh = generate(engine, tokens, SamplingParams(max_tokens=8, ignore_eos=True))
        assert fresh.token_ids == result.token_ids
        tokens += [*result.token_ids, *tokenizer.reply_end_token_ids]


def test_only_the_new_turn_is_computed(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    first, second, third = talk(engine, session_id, 3)
    tokenizer = engine.tokenizer
    turn = tokenizer.render_turn((Message("user", "Step 1: put the bowl on plate 1."),))
    assert first.ledger.reused == 0
    assert first.ledger.computed == first.num_prompt_tokens
    assert second.ledger.computed == len(tokenizer.encode(turn))
    for result in (first, second, third):
        assert num_prompt(result.ledger) == result.num_prompt_tokens
        assert result.ledger.generated == 8


@pytest.mark.parametrize("in_store", [False, True])
def test_parked_and_restored_equals_never_parked(
    in_store: bool, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    plain = make_engine()
    expected = [r.token_ids for r in talk(plain, open_session(plain, window=200), 12)]

    engine = make_engine(store_dir=tmp_path if in_store else None)
    session_id = open_session(engine, window=200)
    got = []
    for index in range(12):
        result = talk(engine, session_id, 1, start=index)[0]
        got.append(result.token_ids)
        if index:
            assert result.ledger.restored > 0
            assert result.ledger.recomputed == 0
        engine.park_session(session_id)
        assert engine.pool.num_free == 256
        assert engine.session(session_id).is_parked
    assert got == expected


def test_sessions_survive_a_restart(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    plain = make_engine()
    expected = [r.token_ids for r in talk(plain, open_session(plain, window=200), 12)]

    first = make_engine(store_dir=tmp_path)
    session_id = open_session(first, window=200)
    got = [r.token_ids for r in talk(first, session_id, 6)]
    before = first.session(session_id)
    first.close()

    second = make_engine(store_dir=tmp_path)
    assert [session.session_id for session in second.sessions()] == [session_id]
    assert second.session(session_id).turns == before.turns
    results = talk(second, session_id, 6, start=6)
    assert got + [r.token_ids for r in results] == expected
    assert results[0].ledger.recomputed == 0


def test_session_of_a_killed_engine_is_computed_again_from_text(
    make_engine: Callable[..., Engine], tiny_model_dir: Path, tmp_path: Path
) -> None:
    plain = make_engine()
    expected = [r.token_ids for r in talk(plain, open_session(plain), 6)]

    config = EngineConfig(
        model=str(tiny_model_dir), num_kv_blocks=256, device="cpu", window=1024, store_dir=tmp_path
    )
    first = Engine(config)  # never closed in order
    session_id = open_session(first)
    got = [r.token_ids for r in talk(first, session_id, 3)]
    first.session_manager.get(session_id).archive.close()  # what the kernel does for a killed process

    second = make_engine(store_dir=tmp_path)
    results = talk(second, session_id, 3, start=3)
    assert got + [r.token_ids for r in results] == expected
    assert results[0].ledger.restored == 0
    assert results[0].ledger.recomputed > 0
    assert results[1].ledger.recomputed == 0


def test_other_models_kv_is_refused_and_its_text_kept(
    make_engine: Callable[..., Engine], make_tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    first = make_engine(store_dir=tmp_path)
    session_id = open_session(first)
    talk(first, session_id, 3)
    texts = [turn.text for turn in first.session(session_id).turns]
    first.close()

    other = make_engine(model=make_tiny_model(seed=77), store_dir=tmp_path)
    assert [turn.text for turn in other.session(session_id).turns] == texts
    result = talk(other, session_id, 1, start=3)[0]
    assert result.ledger.restored == 0
    assert result.ledger.recomputed > 0


def test_flipped_bit_is_recomputed_and_counted(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    plain = make_engine()
    expected = [r.token_ids for r in talk(plain, open_session(plain), 4)]

    engine = make_engine(store_dir=tmp_path, host_kv_bytes=0)
    session_id = open_session(engine)
    got = [r.token_ids for r in talk(engine, session_id, 3)]
    engine.park_session(session_id)
    path = next(tmp_path.glob("*.session"))
    data = bytearray(path.read_bytes())
    kv = engine.session_manager.get(session_id).archive.read_kv(0).data.tobytes()
    data[data.index(kv) + len(kv) // 2] ^= 0x10
    path.write_bytes(data)
    result = talk(engine, session_id, 1, start=3)[0]
    assert [*got, result.token_ids] == expected
    assert engine.stats().num_refused_kv_pieces == 1
    assert result.ledger.recomputed > 0


def test_whole_turns_leave_and_come_back(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine, window=256)
    talk(engine, session_id, 12)
    info = engine.session(session_id)
    archived = [turn.index for turn in info.turns if turn.state is TurnState.ARCHIVED]
    assert archived == list(range(len(archived)))
    assert archived
    assert info.num_window_tokens <= 256

    result = take_turn(engine, turn_request(session_id, "Review.", at=50.0, recall=(1.0, 3.0)))

    assert result.recalled_turns == (1, 2)
    sizes = {turn.index: turn.num_tokens for turn in info.turns}
    assert result.ledger.recalled == sizes[1] + sizes[2]
    assert result.ledger.recomputed == 0
    assert num_prompt(result.ledger) == result.num_prompt_tokens
    states = {turn.index: turn.state for turn in engine.session(session_id).turns}
    assert states[1] is states[2] is TurnState.RECALLED
    assert states[0] is TurnState.ARCHIVED


def test_recalled_turns_are_not_put_in_twice_and_leave_first(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    session_id = open_session(engine, window=256)
    talk(engine, session_id, 12)
    take_turn(engine, turn_request(session_id, "Review.", at=50.0, recall=(1.0, 3.0)))
    again = take_turn(engine, turn_request(session_id, "Again.", at=51.0, recall=(0.0, 3.0)))
    assert again.recalled_turns == (0,)
    assert engine.session(session_id).num_recalled_tokens > 0
    talk(engine, session_id, 4, start=60)  # overflows the window
    info = engine.session(session_id)
    assert info.num_recalled_tokens == 0
    assert [turn.index for turn in info.turns] == list(range(18))


def test_text_recall_computes_what_kv_recall_does_not(make_engine: Callable[..., Engine]) -> None:
    ledgers = {}
    for mode in RecallMode:
        engine = make_engine()
        session_id = open_session(engine, window=256)
        talk(engine, session_id, 12)
        request = turn_request(session_id, "Review.", at=50.0, recall=(1.0, 3.0), mode=mode)
        ledgers[mode] = take_turn(engine, request)
    kv, text, off = (ledgers[mode] for mode in (RecallMode.KV, RecallMode.TEXT, RecallMode.OFF))
    assert kv.ledger.recalled == text.ledger.recomputed > 0
    assert kv.ledger.computed == text.ledger.computed == off.ledger.computed
    assert kv.num_prompt_tokens == text.num_prompt_tokens > off.num_prompt_tokens
    assert kv.recalled_turns == text.recalled_turns == (1, 2)
    assert off.recalled_turns == ()


def test_text_recall_equals_a_request_with_that_text(make_engine: Callable[..., Engine]) -> None:
    """With every window turn gone, the layout is system + recalled + question: exactly computable."""
    engine = make_engine()
    session_id = open_session(engine, window=256)
    talk(engine, session_id, 3)
    filler = "a long message " * 9
    request = turn_request(
        session_id, filler, at=50.0, recall=(0.0, 2.0), mode=RecallMode.TEXT, max_tokens=120
    )
    result = take_turn(engine, request)
    turns = engine.session_manager.get(session_id).turns
    tokenizer = engine.tokenizer
    tokens = tokenizer.encode(tokenizer.render_system(SYSTEM))
    assert result.recalled_turns == (0, 1)
    window = [t for t in engine.session(session_id).turns if t.state is TurnState.WINDOW]
    assert [turn.index for turn in window] == [3]
    for turn in turns[:2]:
        tokens += turn.token_ids
    tokens += tokenizer.encode(tokenizer.render_turn((Message("user", filler),)))
    fresh = generate(engine, tokens, SamplingParams(max_tokens=120, ignore_eos=True))
    assert fresh.token_ids == result.token_ids


def test_present_turns_are_named_and_repeated_on_request(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    talk(engine, session_id, 4)
    plain = take_turn(engine, turn_request(session_id, "Review.", at=9.0, recall=(0.0, 2.0)))
    assert (plain.present_turns, plain.recalled_turns) == ((0, 1), ())
    assert plain.ledger.recalled == 0

    request = turn_request(session_id, "Review.", at=10.0, recall=(0.0, 2.0), present=RecallPresent.REPEAT)
    repeated = take_turn(engine, request)
    assert repeated.present_turns == repeated.recalled_turns == (0, 1)
    assert repeated.ledger.recalled > 0
    assert num_prompt(repeated.ledger) == repeated.num_prompt_tokens


def test_triggers_recall_what_their_rule_names(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine, window=256)
    talk(engine, session_id, 12)
    engine.set_triggers(
        session_id,
        (
            OnMatch(text="first two", range=RecallRange(0.0, 2.0)),
            OnMatch(text="last archived", last_n=1),
            OnMatch(text="as I said", range_in_call=True),
        ),
    )

    def recalled(text: str, recall: tuple[float, float] | None = None) -> tuple[int, ...]:
        branch = engine.fork_session(session_id).session_id
        return take_turn(engine, turn_request(branch, text, at=20.0, recall=recall)).recalled_turns

    archived = [turn.index for turn in engine.session(session_id).turns if turn.state is TurnState.ARCHIVED]
    assert recalled("nothing") == ()
    assert recalled("name the first two") == (0, 1)
    assert recalled("the last archived one") == (archived[-1],)
    assert recalled("a range without its trigger", (1.0, 2.0)) == ()
    assert recalled("as I said", (1.0, 2.0)) == (1,)


def test_history_starts_a_long_session(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    history = tuple(
        (float(i), (Message("user", f"Step {i}: lift bowl {i}."), Message("assistant", "{}")))
        for i in range(30)
    )
    session_id = open_session(engine, window=256, history=history)
    info = engine.session(session_id)
    assert info.num_window_tokens <= 256 * 0.75
    result = take_turn(engine, turn_request(session_id, "Go on.", at=40.0, recall=(2.0, 3.0)))
    assert result.recalled_turns == (2,)
    assert result.ledger.computed == result.num_prompt_tokens  # nothing had ever been computed
    following = take_turn(engine, turn_request(session_id, "Go on.", at=41.0))
    assert following.ledger.recomputed == 0
    assert following.ledger.computed < 40


@pytest.mark.parametrize("num_steps", range(8))
def test_cancel_rolls_back_to_the_last_turn(num_steps: int, make_engine: Callable[..., Engine]) -> None:
    plain = make_engine()
    expected = [r.token_ids for r in talk(plain, open_session(plain), 3)]

    engine = make_engine(max_num_batched_tokens=16)
    session_id = open_session(engine)
    talk(engine, session_id, 2)
    before = engine.session(session_id)
    free = engine.pool.num_free
    request = turn_request(session_id, "A turn that is cancelled " * 3, at=9.0)
    engine.submit(request)
    for _ in range(num_steps):
        engine.step()
    engine.cancel(request.request_id)

    assert not engine.has_work
    assert engine.session(session_id) == before
    assert engine.pool.num_free == free
    assert talk(engine, session_id, 1, start=2)[0].token_ids == expected[2]


def test_a_cut_reply_is_closed_like_a_whole_one(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    result = talk(engine, session_id, 1)[0]
    assert result.finish_reason is FinishReason.LENGTH
    turn = engine.session_manager.get(session_id).turns[0]
    assert turn.token_ids[-len(engine.tokenizer.reply_end_token_ids) :] == (
        engine.tokenizer.reply_end_token_ids
    )


def test_token_id_turns_are_appended_as_they_are(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine, system=None)
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    tokens: list[int] = list(engine.session_manager.get(session_id).record.system_token_ids)
    for index in range(3):
        new = tuple(range(10 + index, 40 + index))
        engine.submit(
            TurnRequest(
                request_id=str(index), session_id=session_id, at=0.0, token_ids=new, sampling=sampling
            )
        )
        result = joined(run(engine)[str(index)])
        tokens += new
        assert generate(engine, tokens, sampling).token_ids == result.token_ids
        tokens += result.token_ids


def test_pressure_parks_idle_sessions_instead_of_deadlocking(
    make_engine: Callable[..., Engine],
) -> None:
    plain = make_engine()
    expected = [r.token_ids for r in talk(plain, open_session(plain, window=256), 5)]

    engine = make_engine(num_kv_blocks=40)  # two windows and a half
    ids = [open_session(engine, window=256) for _ in range(6)]
    got: dict[str, list[tuple[int, ...]]] = {session_id: [] for session_id in ids}
    for index in range(5):
        requests = {}
        for session_id in ids:
            request = turn_request(
                session_id, f"Step {index}: put the bowl on plate {index}.", at=float(index)
            )
            requests[request.request_id] = session_id
            engine.submit(request)
        for request_id, chunks in run(engine).items():
            got[requests[request_id]].append(joined(chunks).token_ids)
    assert all(tokens == expected for tokens in got.values())
    assert any(engine.session(session_id).is_parked for session_id in ids)


def test_one_call_in_flight(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    request = turn_request(session_id, "one", at=0.0)
    engine.submit(request)
    with pytest.raises(SessionBusyError, match="one at a time"):
        engine.submit(turn_request(session_id, "two", at=1.0))
    with pytest.raises(SessionBusyError):
        engine.park_session(session_id)
    engine.close_session(session_id)
    assert engine.pool.num_free == 256
    (end,) = run(engine)[request.request_id]
    assert (end.finish_reason, end.is_request_wrong) == (FinishReason.ERROR, True)
    assert end.error == f"session {session_id} was deleted while the call ran"
    assert not engine.has_work
    with pytest.raises(SessionNotFoundError):
        engine.session(session_id)


def test_a_session_that_is_not_there_is_refused_without_the_stores_place(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    with pytest.raises(SessionNotFoundError, match=r"^no session 'nobody'$"):
        make_engine(store_dir=tmp_path).session("nobody")


def test_a_call_right_after_the_answer_waits_for_the_turn_to_close(
    make_engine: Callable[..., Engine],
) -> None:
    engine = make_engine()
    session_id = open_session(engine)
    request = turn_request(session_id, "one", at=0.0)
    engine.submit(request)
    while not any(chunk.finish_reason for chunk in engine.step()):
        pass
    follow_up = turn_request(session_id, "two", at=1.0)
    engine.submit(follow_up)
    assert joined(run(engine)[follow_up.request_id]).ledger.recomputed == 0


def test_fork_goes_its_own_way(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine(store_dir=tmp_path)
    session_id = open_session(engine, window=256)
    talk(engine, session_id, 8)
    branch = engine.fork_session(session_id, "branch").session_id
    with pytest.raises(SessionExistsError):
        engine.fork_session(session_id, "branch")
    one = take_turn(engine, turn_request(session_id, "left", at=20.0, recall=(0.0, 1.0)))
    two = take_turn(engine, turn_request(branch, "left", at=20.0, recall=(0.0, 1.0)))
    assert one.token_ids == two.token_ids
    assert two.ledger.recomputed == 0
    take_turn(engine, turn_request(branch, "right", at=21.0))
    assert len(engine.session(branch).turns) == len(engine.session(session_id).turns) + 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"window": 5000}, "exceed the 4096 tokens"),
        ({"low_water": 0.9, "high_water": 0.5}, "0 < low <= high <= 1"),
        ({"system": "word " * 300, "window": 128}, "too many for a window of 128"),
    ],
)
def test_impossible_sessions_are_refused(
    fields: dict[str, Any], message: str, make_engine: Callable[..., Engine]
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        open_session(make_engine(), **fields)


def test_turn_larger_than_the_window_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = open_session(engine, window=128)
    with pytest.raises(InvalidRequestError, match="the window is 128"):
        engine.submit(turn_request(session_id, "word " * 200, at=0.0))
    assert not engine.session(session_id).is_busy


def test_full_disk_fails_the_turn_and_loses_nothing(
    make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    engine = make_engine(store_dir=tmp_path)
    session_id = open_session(engine)
    talk(engine, session_id, 2)
    size = next(tmp_path.glob("*.session")).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        request = turn_request(session_id, "no room", at=5.0)
        engine.submit(request)
        last = run(engine)[request.request_id][-1]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert last.finish_reason is FinishReason.ERROR
    assert last.error
    assert "\n" not in last.error
    assert len(engine.session(session_id).turns) == 2
    assert talk(engine, session_id, 1, start=2)[0].ledger.recomputed == 0
