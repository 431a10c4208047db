"""Sessions of an engine that drains, ends or is killed go on at the other one."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from dayshift.engine import Engine
from dayshift.engine.api import EngineDrainingError, EngineError, SamplingParams, SessionConfig
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.router import running_router
from dayshift.engine.server.run import ServerOptions, running_server
from tests.engine.driving import take_turn, turn_request
from tests.engine.router.conftest import (
    Engines,
    engine_program,
    error_of,
    gauge,
    turn,
    two_engines,
    wait_until,
    wait_until_ready,
)

TEXTS = ["put the bowl on the plate", "Result: failed, attempt 1 of 2.", "Review of shift 1", "and now?"]


LONG_REPLY = 1500  # tokens


def replies_of_one_engine(config: EngineConfig, lengths: list[int]) -> list[tuple[int, ...]]:
    engine = Engine(config)
    session_id = engine.open_session(SessionConfig()).session_id
    replies = [
        take_turn(engine, turn_request(session_id, text, 0.0, max_tokens=length)).token_ids
        for text, length in zip(TEXTS, lengths, strict=True)
    ]
    engine.close()
    return replies


@pytest.fixture(scope="module")
def expected(base_config: EngineConfig) -> list[tuple[int, ...]]:
    """Token ids of the replies of one session that never moves."""
    return replies_of_one_engine(base_config, [6, 6, 6, 6])


@pytest.fixture(scope="module")
def expected_long(base_config: EngineConfig) -> list[tuple[int, ...]]:
    """The same, with a long third reply."""
    return replies_of_one_engine(base_config, [6, 6, LONG_REPLY, 6])


@pytest.fixture
def engines(base_config: EngineConfig, tmp_path: Path) -> Iterator[Engines]:
    with two_engines(base_config, tmp_path) as engines:
        yield engines


def moved(router_url: str) -> float:
    return gauge(router_url, "dayshift_router_moved_sessions_total")


def test_a_draining_engine_gives_its_sessions_away(engines: Engines, expected: list[tuple[int, ...]]):
    first, second = engines.urls
    with (
        DayshiftClient(first) as direct,
        running_router(engines.urls) as url,
        DayshiftClient(url, timeout_s=240) as client,
    ):
        idle, parked, busy = [direct.open_session(SessionConfig()).session_id for _ in range(3)]
        for session_id in (idle, parked):
            assert client.turn(turn(session_id, TEXTS[0])).token_ids == expected[0]
        client.park_session(parked)
        running = client.stream_turn(turn(busy, TEXTS[0], SamplingParams(max_tokens=600, ignore_eos=True)))
        next(running)

        assert httpx.post(f"{first}/v1/drain").status_code == 202
        assert httpx.get(f"{first}/health").json()["status"] == "draining"
        for session_id in (idle, parked):
            reply = client.turn(turn(session_id, TEXTS[1]))
            assert reply.token_ids == expected[1]
            assert reply.ledger.restored > 0
            assert reply.ledger.recomputed == 0
        with pytest.raises(EngineDrainingError):
            direct.open_session(SessionConfig())
        assert sum(len(chunk.token_ids) for chunk in running) == 599  # finished, not cut off

        # The busy one is let go of when its call has ended; its next call waits for that.
        reply = client.turn(turn(busy, TEXTS[1]))
        assert reply.ledger.restored > 600
        assert reply.ledger.recomputed == 0
        assert gauge(first, "dayshift_engine_num_open_sessions") == 0
        num_blocks = gauge(first, "dayshift_engine_num_kv_blocks")
        assert gauge(first, "dayshift_engine_num_free_kv_blocks") == num_blocks
        assert moved(url) == 3
        new_id = client.open_session(SessionConfig()).session_id
        with DayshiftClient(second) as other:
            assert other.session(new_id).session_id == new_id
        seen = httpx.get(f"{url}/v1/engines").json()["engines"]
        assert {engine["url"]: engine["state"] for engine in seen} == {first: "draining", second: "ready"}


def test_an_engine_without_a_store_cannot_be_drained(base_config: EngineConfig):
    with running_server(base_config, ServerOptions(port=0, in_process=True)) as url:
        assert "in memory only" in error_of(httpx.post(f"{url}/v1/drain"), 400)["message"]
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("is_core_killed_too", [False, True])
def test_a_killed_engine_loses_nothing_that_was_answered(
    base_config: EngineConfig,
    tmp_path: Path,
    expected: list[tuple[int, ...]],
    expected_long: list[tuple[int, ...]],
    is_core_killed_too: bool,
):
    """A core whose front is killed may still finish its call: submitted again, a turn is taken once."""
    config = replace(base_config, store_dir=tmp_path)
    with (
        engine_program(base_config, tmp_path) as (killed_url, program),
        running_router([killed_url, "http://127.0.0.1:1"]) as lone_url,
        DayshiftClient(lone_url, timeout_s=240) as client,
    ):
        used, parked, busy = [client.open_session(SessionConfig()).session_id for _ in range(3)]
        for session_id in (used, parked, busy):
            assert client.turn(turn(session_id, TEXTS[0])).token_ids == expected[0]
            assert client.turn(turn(session_id, TEXTS[1])).token_ids == expected[1]
        client.park_session(parked)

        with (
            running_server(config, ServerOptions(port=0, in_process=True)) as other_url,
            running_router([killed_url, other_url]) as url,
            DayshiftClient(url, timeout_s=240) as client,
        ):
            for session_id in (used, parked, busy):  # the router learns where they are
                assert len(client.session(session_id).turns) == 2
            lost = turn(busy, TEXTS[2], SamplingParams(max_tokens=LONG_REPLY, ignore_eos=True))
            running = client.stream_turn(lost)
            next(running)
            if is_core_killed_too:
                os.killpg(program.pid, signal.SIGKILL)
            else:
                program.kill()
            with suppress(EngineError):  # on a quick machine all of it may have arrived
                list(running)

            for text, reply in zip(TEXTS[2:], expected[2:], strict=True):
                assert [client.turn(turn(s, text)).token_ids for s in (used, parked)] == [reply] * 2
            assert client.turn(lost).token_ids == expected_long[2]
            again = client.turn(lost)
            assert again.is_repeated
            assert again.token_ids == expected_long[2]
            assert client.turn(turn(busy, TEXTS[3])).token_ids == expected_long[3]
            assert len(client.session(busy).turns) == 4
            assert moved(url) == 3
            health = httpx.get(f"{url}/health").json()
            assert (health["status"], health["num_ready"]) == ("ok", 1)


def test_an_engine_that_is_ended_in_order_hands_over_and_comes_back(
    base_config: EngineConfig, tmp_path: Path, expected: list[tuple[int, ...]]
):
    config = replace(base_config, store_dir=tmp_path)
    options = ServerOptions(port=0, in_process=True)
    with ExitStack() as stack:
        second = stack.enter_context(running_server(config, options))
        ended = stack.enter_context(ExitStack())
        first = ended.enter_context(running_server(config, options))
        url = stack.enter_context(running_router([first, second]))
        client = stack.enter_context(DayshiftClient(url, timeout_s=60))
        wait_until_ready(url, 2)
        session_ids = [client.open_session(SessionConfig()).session_id for _ in range(2)]
        for session_id in session_ids:
            assert client.turn(turn(session_id, TEXTS[0])).token_ids == expected[0]

        ended.close()
        for session_id in session_ids:
            reply = client.turn(turn(session_id, TEXTS[1]))
            assert reply.token_ids == expected[1]
            assert reply.ledger.recomputed == 0
        assert moved(url) == 1

        port = httpx.URL(first).port
        assert port is not None
        stack.enter_context(running_server(config, replace(options, port=port)))
        wait_until(lambda: httpx.get(f"{url}/health").json()["num_ready"] == 2, "ready again")
        for session_id in session_ids:
            assert client.turn(turn(session_id, TEXTS[2])).token_ids == expected[2]
        assert moved(url) == 1
