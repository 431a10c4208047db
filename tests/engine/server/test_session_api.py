import dataclasses
import json
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from dayshift.engine.api import (
    FinishReason,
    InvalidRequestError,
    Message,
    OnMatch,
    RecallMode,
    RecallPresent,
    RecallRange,
    RequestIdInUseError,
    SamplingParams,
    SessionBusyError,
    SessionConfig,
    SessionExistsError,
    SessionNotFoundError,
    TurnRequest,
    TurnState,
)
from dayshift.engine.client import DayshiftClient
from dayshift.engine.tokenizer import Tokenizer

SHORT = SamplingParams(max_tokens=6, ignore_eos=True)


def turn(
    session_id: str, text: str, at: float = 0.0, sampling: SamplingParams = SHORT, **fields: Any
) -> TurnRequest:
    return TurnRequest(
        request_id=uuid.uuid4().hex,
        session_id=session_id,
        at=at,
        messages=(Message("user", text),),
        sampling=sampling,
        **fields,
    )


@pytest.fixture
def session_id(dayshift: DayshiftClient) -> Iterator[str]:
    info = dayshift.open_session(SessionConfig(system="be brief", window=256))
    yield info.session_id
    dayshift.close_session(info.session_id)


def test_only_the_new_turn_is_computed(dayshift: DayshiftClient, session_id: str):
    first = dayshift.turn(turn(session_id, "put the bowl on the plate", at=1))
    second = dayshift.turn(turn(session_id, "Result: done.", at=2))
    info = dayshift.session(session_id)
    assert first.ledger.computed == first.num_prompt_tokens
    assert second.ledger.reused > 0
    assert second.ledger.computed + second.ledger.reused == second.num_prompt_tokens
    assert [(t.index, t.at) for t in info.turns] == [(0, 1), (1, 2)]
    assert {t.state for t in info.turns} == {TurnState.WINDOW}
    assert "put the bowl on the plate" in info.turns[0].text
    assert info.num_window_tokens == info.num_system_tokens + sum(t.num_tokens for t in info.turns)


def test_history_given_at_creation_is_the_history_taken_turn_by_turn(dayshift: DayshiftClient):
    first = (Message("user", "Shift 1, job 1"), Message("assistant", "next"))
    second = (Message("user", "Result: failed"), Message("assistant", "stop it"))
    history = ((0.0, first), (1.0, second))
    info = dayshift.open_session(SessionConfig(system="s", window=256, history=history))
    assert [t.at for t in info.turns] == [0, 1]
    reply = dayshift.turn(turn(info.session_id, "and now?", at=2))
    messages = [Message("system", "s"), *first, *second, Message("user", "and now?")]
    assert reply.text == dayshift.chat(messages, SHORT).text
    dayshift.close_session(info.session_id)


def test_a_streamed_turn_is_the_whole_turn(dayshift: DayshiftClient, session_id: str):
    dayshift.turn(turn(session_id, "first", at=1))
    fork = dayshift.fork_session(session_id, f"{session_id}-fork").session_id
    whole = dayshift.turn(turn(session_id, "second", at=2))
    chunks = list(dayshift.stream_turn(turn(fork, "second", at=2)))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == [whole.finish_reason]
    assert chunks[-1].ledger is not None
    assert chunks[-1].ledger.generated == whole.ledger.generated
    dayshift.close_session(fork)


def test_turns_that_left_the_window_are_recalled_by_their_time(dayshift: DayshiftClient, session_id: str):
    for at in range(12):
        dayshift.turn(turn(session_id, f"Shift 1, job {at}, step 3: open the middle drawer", at=at))
    states = [t.state for t in dayshift.session(session_id).turns]
    assert states[0] is TurnState.ARCHIVED
    assert states[-1] is TurnState.WINDOW
    asked = RecallRange(0, 2)
    off = dayshift.turn(turn(session_id, "off", at=20, recall_range=asked, recall_mode=RecallMode.OFF))
    assert off.recalled_turns == ()
    reply = dayshift.turn(turn(session_id, "Review", at=21, recall_range=asked))
    assert reply.recalled_turns == (0, 1)
    assert reply.ledger.recalled > 0
    present = RecallRange(20, 21)
    reply = dayshift.turn(
        turn(session_id, "again", at=22, recall_range=present, recall_present=RecallPresent.REPEAT)
    )
    assert reply.present_turns == (12,)


def test_triggers_recall_when_a_turn_matches(dayshift: DayshiftClient, session_id: str):
    triggers = (OnMatch(text="Review", last_n=2), OnMatch(text="hours", range=RecallRange(0, 1)))
    assert dayshift.set_triggers(session_id, triggers).triggers == triggers
    for at in range(12):
        dayshift.turn(turn(session_id, f"Shift 1, job {at}, step 3: open the middle drawer", at=at))
    assert dayshift.turn(turn(session_id, "the first hours", at=20)).recalled_turns == (0,)
    assert len(dayshift.turn(turn(session_id, "Review now", at=21)).recalled_turns) == 2
    assert dayshift.set_triggers(session_id, ()).triggers == ()
    with pytest.raises(InvalidRequestError, match=r"^triggers: exactly one of range, last_n"):
        dayshift.set_triggers(session_id, (OnMatch(text="Review"),))


def test_a_parked_session_goes_on_as_if_it_had_not_been(dayshift: DayshiftClient, session_id: str):
    dayshift.turn(turn(session_id, "first", at=1))
    fork = dayshift.fork_session(session_id).session_id
    assert dayshift.park_session(fork).is_parked
    parked = dayshift.turn(turn(fork, "second", at=2))
    assert parked.ledger.restored > 0
    assert parked.token_ids == dayshift.turn(turn(session_id, "second", at=2)).token_ids
    dayshift.close_session(fork)


def test_text_messages_and_token_ids_say_the_same(
    http: httpx.Client, dayshift: DayshiftClient, tiny_model_dir: Path
):
    ids = Tokenizer(tiny_model_dir).encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    bodies = [{"text": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}, {"token_ids": ids}]
    replies = []
    for body in bodies:
        session = dayshift.open_session(SessionConfig(window=128)).session_id
        response = http.post(f"/v1/sessions/{session}/turns", json=body | {"max_tokens": 8})
        replies.append(response.json()["token_ids"])
        dayshift.close_session(session)
    assert replies[0] == replies[1] == replies[2]


def test_at_defaults_to_unix_time_and_the_window_to_the_engines(http: httpx.Client, dayshift: DayshiftClient):
    session = http.post("/v1/sessions", json={}).json()["session_id"]
    http.post(f"/v1/sessions/{session}/turns", json={"text": "hi", "max_tokens": 1})
    info = dayshift.session(session)
    assert info.turns[0].at > 1.7e9
    assert info.window == 512
    dayshift.close_session(session)


def test_sessions_are_listed_until_they_are_deleted(dayshift: DayshiftClient):
    opened = dayshift.open_session(SessionConfig(session_id="listed"))
    assert opened in dayshift.sessions()
    with pytest.raises(SessionExistsError):
        dayshift.open_session(SessionConfig(session_id="listed"))
    dayshift.close_session("listed")
    assert "listed" not in [info.session_id for info in dayshift.sessions()]
    for call in (dayshift.session, dayshift.close_session, dayshift.park_session, dayshift.fork_session):
        with pytest.raises(SessionNotFoundError, match="listed"):
            call("listed")
    with pytest.raises(SessionNotFoundError):
        dayshift.turn(turn("listed", "hi"))


def test_one_call_of_a_session_at_a_time(dayshift: DayshiftClient, session_id: str):
    stream = dayshift.stream_turn(turn(session_id, "long", sampling=SamplingParams(max_tokens=200)))
    next(stream)
    with pytest.raises(SessionBusyError, match="one at a time"):
        dayshift.turn(turn(session_id, "impatient"))
    stream.close()


def test_a_request_id_in_use_is_refused_and_its_owner_goes_on(dayshift: DayshiftClient, session_id: str):
    fork = dayshift.fork_session(session_id).session_id
    first = turn(session_id, "long", sampling=SamplingParams(max_tokens=100, ignore_eos=True))
    chunks = dayshift.stream_turn(first)
    next(chunks)
    with pytest.raises(RequestIdInUseError, match="in use"):
        dayshift.turn(dataclasses.replace(first, session_id=fork))
    assert 1 + sum(1 for _ in chunks) == 100
    dayshift.close_session(fork)


def test_a_turn_larger_than_the_window_leaves_no_trace(dayshift: DayshiftClient, session_id: str):
    with pytest.raises(InvalidRequestError, match="window"):
        dayshift.turn(turn(session_id, "word " * 400))
    info = dayshift.session(session_id)
    assert info.turns == ()
    assert not info.is_busy


def test_a_schema_holds_in_sessions_too(dayshift: DayshiftClient, session_id: str):
    schema = {"type": "object", "properties": {"redo": {"const": []}}, "required": ["redo"]}
    sampling = SamplingParams(max_tokens=60, json_schema=schema | {"additionalProperties": False})
    reply = dayshift.turn(turn(session_id, "Review", sampling=sampling))
    assert json.loads(reply.text) == {"redo": []}
    assert reply.finish_reason is FinishReason.STOP


def test_many_sessions_at_once_do_not_mix(dayshift: DayshiftClient):
    def operation(number: int) -> list[tuple[int, ...]]:
        session = dayshift.open_session(SessionConfig(system=f"robot {number % 3}", window=256)).session_id
        replies = [dayshift.turn(turn(session, f"step {at}", at=at)).token_ids for at in range(4)]
        dayshift.close_session(session)
        return replies

    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(operation, range(9)))
    alone = [operation(number) for number in range(3)]
    assert together == alone * 3


def test_the_metrics_count_what_happened(
    dayshift: DayshiftClient, session_id: str, gauge: Callable[[str], float]
):
    names = ["generated", "computed"]
    before = [gauge(f'dayshift_tokens_total{{source="{name}"}}') for name in names]
    reply = dayshift.turn(turn(session_id, "count me"))
    after = [gauge(f'dayshift_tokens_total{{source="{name}"}}') for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [6, reply.num_prompt_tokens]
    assert gauge("dayshift_engine_num_running") == 0
    assert gauge("dayshift_engine_num_sessions") >= 1
