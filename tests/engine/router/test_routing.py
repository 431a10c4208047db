"""A router in front of two real engines on one store."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from dayshift.engine.api import SessionConfig, SessionExistsError, SessionLockedError, SessionNotFoundError
from dayshift.engine.client import DayshiftClient, EngineTimeoutError
from dayshift.engine.config import EngineConfig
from dayshift.engine.router import running_router
from dayshift.engine.router.run import RouterOptions
from dayshift.types import DayshiftError
from tests.engine.router.conftest import (
    LONG,
    SHORT,
    Engines,
    error_of,
    gauge,
    turn,
    two_engines,
    wait_until_ready,
)

KEY = "the key"


@pytest.fixture(scope="module")
def engines(base_config: EngineConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with two_engines(base_config, tmp_path_factory.mktemp("store")) as engines:
        yield engines


@pytest.fixture(scope="module")
def router_url(engines: Engines) -> Iterator[str]:
    with running_router(engines.urls) as url:
        wait_until_ready(url, len(engines.urls))
        yield url


@pytest.fixture
def client(router_url: str) -> Iterator[DayshiftClient]:
    with DayshiftClient(router_url, timeout_s=60) as client:
        yield client


def engines_seen(router_url: str) -> list[dict]:
    return httpx.get(f"{router_url}/v1/engines").json()["engines"]


def is_held(engine_url: str, session_id: str) -> bool:
    """Whether an engine has the session open, of which one of them has."""
    with DayshiftClient(engine_url) as client:
        try:
            client.session(session_id)
        except SessionLockedError:
            return False
    return True


def test_sessions_are_spread_and_stay_where_they_are(
    client: DayshiftClient, engines: Engines, router_url: str
):
    before = [engine["num_sessions"] for engine in engines_seen(router_url)]
    session_ids = [client.open_session(SessionConfig()).session_id for _ in range(6)]
    holders = [[is_held(url, session_id) for url in engines.urls] for session_id in session_ids]
    assert all(sum(held) == 1 for held in holders)
    after = [engine["num_sessions"] for engine in engines_seen(router_url)]
    assert [new - old for old, new in zip(before, after, strict=True)] == [3, 3]
    for text in ("put the bowl on the plate", "Result: done."):
        results = [client.turn(turn(session_id, text)) for session_id in session_ids]
        assert len({result.token_ids for result in results}) == 1
    assert all(result.ledger.reused > 0 for result in results)
    assert [[is_held(url, session_id) for url in engines.urls] for session_id in session_ids] == holders

    fork_id = client.fork_session(session_ids[0]).session_id
    assert [is_held(url, fork_id) for url in engines.urls] == holders[0]
    listed = [info.session_id for info in client.sessions()]
    assert sorted({*session_ids, fork_id} & {*listed}) == sorted([*session_ids, fork_id])
    assert len(listed) == len(set(listed))
    for session_id in (*session_ids, fork_id):
        client.close_session(session_id)
        with pytest.raises(SessionNotFoundError):
            client.session(session_id)
    assert [engine["num_sessions"] for engine in engines_seen(router_url)] == before


def test_a_listed_session_shows_what_its_engine_knows(client: DayshiftClient):
    session_id = client.open_session(SessionConfig()).session_id
    client.turn(turn(session_id, "in the pool"))
    info = next(info for info in client.sessions() if info.session_id == session_id)
    assert not info.is_parked
    assert len(info.turns) == 1
    assert client.park_session(session_id).is_parked
    client.close_session(session_id)


def test_a_new_router_finds_the_sessions(client: DayshiftClient, engines: Engines):
    session_ids = [client.open_session(SessionConfig()).session_id for _ in range(4)]
    for session_id in session_ids:
        client.turn(turn(session_id, "remember this"))
    with running_router(engines.urls) as url, DayshiftClient(url, timeout_s=60) as other:
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(other.turn, [turn(session_id, "and now") for session_id in session_ids]))
        assert all(result.ledger.reused > 0 for result in results)
        for session_id in session_ids:
            other.close_session(session_id)


def test_a_name_is_given_once(client: DayshiftClient):
    for number in range(2):  # one at each engine
        client.open_session(SessionConfig(session_id=f"named-{number}"))
    for number in range(2):
        with pytest.raises(SessionExistsError):
            client.open_session(SessionConfig(session_id=f"named-{number}"))
        client.close_session(f"named-{number}")


def test_streamed_turns_equal_whole_ones(client: DayshiftClient):
    session_id = client.open_session(SessionConfig()).session_id
    fork_id = client.fork_session(session_id).session_id
    chunks = list(client.stream_turn(turn(session_id, "push the plate")))
    result = client.turn(turn(fork_id, "push the plate"))
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == result.token_ids
    for each in (session_id, fork_id):
        client.close_session(each)


def test_the_official_client_works_through_it(router_url: str):
    with openai.OpenAI(base_url=f"{router_url}/v1", api_key="unused", max_retries=0) as api:
        assert [model.id for model in api.models.list()] == ["tiny"]
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        create = partial(api.chat.completions.create, messages=messages, max_tokens=5, temperature=0)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in create(model="tiny", stream=True))
        assert text == create(model="tiny").choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            create(model="other")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_stops_its_call_at_the_engine(
    client: DayshiftClient, router_url: str, engines: Engines, stream: bool
):
    session_id = client.open_session(SessionConfig()).session_id
    if stream:
        chunks = client.stream_turn(turn(session_id, "given up", LONG))
        next(chunks)
        assert sum(engine["num_in_flight"] for engine in engines_seen(router_url)) == 1
        chunks.close()
    else:
        with DayshiftClient(router_url, timeout_s=0.5) as impatient, pytest.raises(EngineTimeoutError):
            impatient.turn(turn(session_id, "given up", LONG))
    deadline = time.monotonic() + 30
    while any(gauge(url, "dayshift_engine_num_running") for url in engines.urls):
        assert time.monotonic() < deadline, "the call still runs after its client has gone"
        time.sleep(0.02)
    assert client.session(session_id).turns == ()
    assert sum(engine["num_in_flight"] for engine in engines_seen(router_url)) == 0
    client.close_session(session_id)


def test_the_engines_errors_pass_unchanged(router_url: str, engines: Engines):
    for url in (router_url, engines.urls[0]):
        error = error_of(httpx.post(f"{url}/v1/chat/completions", json={"banana": 1, "messages": []}), 400)
        assert error["param"] == "messages"
        assert error_of(httpx.get(f"{url}/v1/sessions/nobody"), 404)["code"] == "session_not_found"
        assert error_of(httpx.get(f"{url}/nowhere"), 404)["code"] == "not_found"


def test_an_engine_is_not_drained_by_accident(router_url: str, engines: Engines):
    assert "its own address" in error_of(httpx.post(f"{router_url}/v1/drain"), 400)["message"]
    assert all(httpx.get(f"{url}/health").status_code == 200 for url in engines.urls)


def test_it_has_health_and_metrics_of_its_own(router_url: str, engines: Engines):
    health = httpx.get(f"{router_url}/health")
    assert (health.status_code, health.json()) == (200, {"status": "ok", "num_engines": 2, "num_ready": 2})
    httpx.get(f"{router_url}/v1/models")
    metrics = httpx.get(f"{router_url}/metrics").text
    for url in engines.urls:
        assert f'dayshift_router_engine_state{{engine="{url}",state="ready"}} 1.0' in metrics
        assert f'dayshift_router_engine_state{{engine="{url}",state="dead"}} 0.0' in metrics
    num_blocks = [gauge(url, "dayshift_engine_num_kv_blocks") for url in engines.urls]
    assert gauge(router_url, "dayshift_engine_num_kv_blocks") == sum(num_blocks)
    counts = [line for line in metrics.splitlines() if line.startswith("dayshift_router_responses_total")]
    assert any('status="200"' in line and float(line.split()[-1]) > 0 for line in counts)


def test_one_key_for_router_and_engines(base_config: EngineConfig, tmp_path: Path):
    with (
        two_engines(base_config, tmp_path, api_key=KEY) as engines,
        running_router(engines.urls, RouterOptions(port=0, api_key=KEY)) as url,
    ):
        assert httpx.get(f"{url}/health").json()["num_ready"] == 2
        for path in ("/v1/models", "/v1/sessions", "/v1/engines", "/metrics"):
            assert error_of(httpx.get(f"{url}{path}"), 401)["code"] == "unauthorized"
        with DayshiftClient(url, api_key=KEY) as client:
            session_id = client.open_session(SessionConfig()).session_id
            assert client.turn(turn(session_id, "hi", SHORT)).ledger.generated == SHORT.max_tokens
            assert [info.session_id for info in client.sessions()] == [session_id]


def test_without_a_key_it_listens_and_answers_on_loopback_only(router_url: str):
    with (
        pytest.raises(DayshiftError, match="needs an API key"),
        running_router(["http://127.0.0.1:1"], RouterOptions(host="0.0.0.0", port=0)),
    ):
        pass
    response = httpx.get(f"{router_url}/v1/models", headers={"host": "evil.example"})
    assert "loopback" in error_of(response, 400)["message"]


def test_a_router_without_engines_says_so():
    with running_router(["http://127.0.0.1:1"]) as url, httpx.Client(base_url=url) as client:
        assert (client.get("/health").status_code, client.get("/health").json()["status"]) == (503, "dead")
        calls = [("GET", "/v1/models"), ("GET", "/v1/sessions"), ("POST", "/v1/sessions/s/turns")]
        for method, path in calls:
            error = error_of(client.request(method, path), 503)
            assert error["code"] == "engine_unreachable"
            assert "http://127.0.0.1:1 is unreachable" in error["message"]
