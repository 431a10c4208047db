"""Triggers: substring, pattern, or the model's own keys; what they name; what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import (
    InvalidRequestError,
    MatchKind,
    OnMatch,
    RecallMode,
    RecallRange,
    SessionConfig,
    TurnState,
)
from tests.engine.driving import take_turn, turn_request

REGEX, SEMANTIC = MatchKind.REGEX, MatchKind.SEMANTIC
TOPICS = ("open the middle drawer", "turn on the stove", "put the wine bottle on the rack")


@pytest.fixture
def make_engine(tiny_model_dir: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**fields: Any) -> Engine:
        config = EngineConfig(
            model=str(tiny_model_dir), device="cpu", num_kv_blocks=256, window=256, restore="read", **fields
        )
        engines.append(Engine(config))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_invariants()
        engine.close()


def session_about(engine: Engine, texts: list[str]) -> str:
    session_id = engine.open_session(SessionConfig(system="You lead.")).session_id
    for at, text in enumerate(texts):
        take_turn(engine, turn_request(session_id, text, at=float(at), max_tokens=1))
    return session_id


def archived(engine: Engine, session_id: str) -> list[int]:
    turns = engine.session(session_id).turns
    return [turn.index for turn in turns if turn.state is TurnState.ARCHIVED]


def recalled(engine: Engine, session_id: str, text: str, **fields: Any) -> tuple[int, ...]:
    branch = engine.fork_session(session_id).session_id
    turns = take_turn(engine, turn_request(branch, text, at=99.0, **fields)).recalled_turns
    engine.close_session(branch)
    return turns


def test_a_pattern_matches_the_turns_text(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = session_about(engine, [f"Step {i}: lift the bowl." for i in range(14)])
    rules = (
        OnMatch(text=r"(?i)review of shift \d+", match=REGEX, range=RecallRange(0.0, 2.0)),
        OnMatch(text=r"^what .* last\?$", match=REGEX, last_n=1),
    )
    engine.set_triggers(session_id, rules)
    assert recalled(engine, session_id, "REVIEW of Shift 12, please.") == (0, 1)
    assert recalled(engine, session_id, "Review of shift two") == ()
    assert recalled(engine, session_id, "what came last?") == (archived(engine, session_id)[-1],)


@pytest.mark.parametrize("pattern", [r"(a|a|b?a)+$", r"(a+a+)+$", r"(.*)(.*)(.*)(.*)x", r"(a?){40}a{40}b"])
def test_a_pattern_that_backtracks_for_ever_elsewhere_takes_no_time(
    pattern: str, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    session_id = session_about(engine, ["hello"])
    engine.set_triggers(session_id, (OnMatch(text=pattern, match=REGEX, last_n=1),))
    reply = take_turn(engine, turn_request(session_id, "a" * 60 + "!", at=9.0))
    assert reply.recalled_turns == ()


@pytest.mark.parametrize(
    "pattern", ["a{1001}", "((((a{999}){999}){999}){999})", r"(?:\p{L}{999}){9}", "(?<=a)b", r"(a)\1", "(?R)"]
)
def test_a_pattern_that_would_take_all_memory_is_refused(
    pattern: str, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    session_id = engine.open_session(SessionConfig()).session_id
    with pytest.raises(InvalidRequestError, match="not a regular expression that RE2 takes"):
        engine.set_triggers(session_id, (OnMatch(text=pattern, match=REGEX, last_n=1),))
    assert engine.session(session_id).triggers == ()


def test_a_range_that_ends_before_it_begins_is_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = session_about(engine, ["hello"])
    request = turn_request(session_id, "what?", at=9.0, recall=(600.0, 0.0))
    with pytest.raises(InvalidRequestError, match="recall_range: ends at 0, before it begins at 600"):
        take_turn(engine, request)
    take_turn(engine, turn_request(session_id, "and now?", at=9.0, recall=(6.0, 6.0)))


def test_too_many_triggers_are_refused(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    rules = tuple(OnMatch(text=f"x{i}", last_n=1) for i in range(65))
    session_id = engine.open_session(SessionConfig()).session_id
    with pytest.raises(InvalidRequestError, match="65 rules; 64 allowed"):
        engine.set_triggers(session_id, rules)
    engine.set_triggers(session_id, rules[:64])


@pytest.mark.parametrize("is_parked", [False, True])
@pytest.mark.parametrize("topic", range(3))
def test_the_turn_most_like_the_question_comes_back(
    topic: int, is_parked: bool, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    session_id = session_about(engine, [f"{TOPICS[i % 3]}, {TOPICS[i % 3]}" for i in range(24)])
    engine.set_triggers(session_id, (OnMatch(match=SEMANTIC, similar_n=1),))
    if is_parked:
        engine.park_session(session_id)
    turns = recalled(engine, session_id, f"{TOPICS[topic]}, {TOPICS[topic]}?")
    assert [turn % 3 for turn in turns] == [topic]
    assert set(turns) <= set(archived(engine, session_id))
    assert recalled(engine, session_id, TOPICS[topic], mode=RecallMode.OFF) == ()


def test_a_score_can_be_too_low(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    session_id = session_about(engine, [f"{TOPICS[i % 3]}, {TOPICS[i % 3]}" for i in range(24)])
    engine.set_triggers(session_id, (OnMatch(match=SEMANTIC, similar_n=24, min_score=1.0),))
    assert recalled(engine, session_id, "abc") == ()
    engine.set_triggers(session_id, (OnMatch(match=SEMANTIC, similar_n=24, min_score=-1.0),))
    assert len(recalled(engine, session_id, "abc")) > 2


def test_triggers_survive_a_restart(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    engine = make_engine(store_dir=tmp_path)
    session_id = session_about(engine, ["hello"])
    rules = (OnMatch(text="a+", match=REGEX, last_n=2), OnMatch(match=SEMANTIC, similar_n=3, min_score=0.2))
    engine.set_triggers(session_id, rules)
    engine.close()
    assert make_engine(store_dir=tmp_path).session(session_id).triggers == rules


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (OnMatch(text="", last_n=1), "text must not be empty"),
        (OnMatch(text="x"), "exactly one of range, last_n and range_in_call"),
        (OnMatch(text="x", last_n=1, range_in_call=True), "exactly one of"),
        (OnMatch(text="x", last_n=0), "last_n must be at least 1, not 0"),
        (OnMatch(text="x", range=RecallRange(2.0, 1.0)), "range: ends at 1, before it begins at 2"),
        (OnMatch(text="(", match=REGEX, last_n=1), "is not a regular expression"),
        (OnMatch(text="x" * 2000, match=REGEX, last_n=1), "2000 characters; 1000 allowed"),
        (OnMatch(match=SEMANTIC), "needs similar_n"),
        (OnMatch(match=SEMANTIC, similar_n=0), "needs similar_n"),
        (OnMatch(match=SEMANTIC, similar_n=1, text="x"), "similar_n and min_score only"),
        (OnMatch(match=SEMANTIC, similar_n=1, min_score=2.0), "between -1 and 1, not 2"),
        (OnMatch(text="x", last_n=1, similar_n=1), "similar_n belongs to a semantic rule"),
    ],
)
def test_wrong_triggers_are_refused(rule: OnMatch, message: str, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        engine.set_triggers(engine.open_session(SessionConfig()).session_id, (rule,))
