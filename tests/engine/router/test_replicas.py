"""Data parallel: several engines of one configuration behind one address."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from dayshift.engine.api import SessionConfig
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.router import running_router
from dayshift.engine.router.replicas import replica_config, running_replicas
from dayshift.engine.server.run import ServerOptions
from dayshift.types import DayshiftError
from tests.engine.router.conftest import gauge, turn, wait_until, wait_until_ready

TEXTS = ["put the bowl on the plate", "Result: failed, attempt 1 of 2.", "and now?"]


@dataclass(frozen=True)
class Replicas:
    """Two engines as processes, and a router's URL."""

    urls: tuple[str, ...]
    url: str


@pytest.fixture
def replicas(base_config: EngineConfig, tmp_path: Path) -> Iterator[Replicas]:
    config = replace(base_config, store_dir=tmp_path)
    with running_replicas(config, ServerOptions(model_name="tiny"), 2) as urls, running_router(urls) as url:
        wait_until_ready(url, 2)
        yield Replicas(urls, url)
    assert not multiprocessing.active_children()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def core_of(index: int) -> int:
    """The process of an engine's core."""
    server = next(p for p in multiprocessing.active_children() if p.name == f"dayshift-server-{index}")
    assert server.pid is not None
    by_command = {child: Path(f"/proc/{child}/cmdline").read_text() for child in children_of(server.pid)}
    return next(child for child, command in by_command.items() if "resource_tracker" not in command)


def test_sessions_stay_with_their_engine_and_go_on_when_its_core_dies(replicas: Replicas):
    with DayshiftClient(replicas.url, timeout_s=120) as client:
        sessions = [client.open_session(SessionConfig()).session_id for _ in range(4)]
        replies = {session_id: [client.turn(turn(session_id, TEXTS[0]))] for session_id in sessions}
        for session_id in sessions:
            replies[session_id].append(client.turn(turn(session_id, TEXTS[1])))

        assert all(reply.ledger.recomputed == 0 for _, reply in replies.values()), "a session moved"
        held = [
            engine["num_sessions"] for engine in httpx.get(f"{replicas.url}/v1/engines").json()["engines"]
        ]
        assert held == [2, 2]
        steps = [gauge(url, "dayshift_engine_num_steps") for url in replicas.urls]
        assert min(steps) > 0
        assert gauge(replicas.url, "dayshift_engine_num_steps") == sum(steps)
        assert [gauge(url, "dayshift_generation_seconds_count") for url in replicas.urls] == [4, 4]
        assert gauge(replicas.url, "dayshift_generation_seconds_count") == 8

        os.kill(core_of(0), signal.SIGKILL)

        def states() -> list[tuple[str, str]]:
            engines = httpx.get(f"{replicas.url}/v1/engines").json()["engines"]
            return [(engine["state"], engine["reason"]) for engine in engines]

        wait_until(lambda: states()[0][0] == "dead", "reported")
        assert "exit code -9" in states()[0][1]
        last = [client.turn(turn(session_id, TEXTS[2])) for session_id in sessions]
        assert len({reply.token_ids for reply in last}) == 1, "the same conversation has the same answer"
        assert gauge(replicas.url, "dayshift_router_moved_sessions_total") == 2


def test_an_engine_that_cannot_start_ends_the_others(base_config: EngineConfig):
    config = replace(base_config, num_kv_blocks=None, kv_cache_bytes=1)
    with (
        pytest.raises(DayshiftError, match=r"^engine 0: kv_cache_bytes 1 is less than one KV block"),
        running_replicas(config, ServerOptions(), 2),
    ):
        pass
    assert not multiprocessing.active_children()


def test_each_engine_has_gpus_of_its_own(base_config: EngineConfig):
    config = replace(base_config, tensor_parallel=2, first_gpu=1)
    assert [replica_config(config, index).first_gpu for index in range(3)] == [1, 3, 5]
