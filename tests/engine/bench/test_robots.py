"""The closed loop of robots, small: against sessions, and with the whole history sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from dayshift.engine.bench.robots import RobotsLoad, RobotsRow, SourceShares
from dayshift.engine.bench.robots_client import Call, _row
from dayshift.engine.bench.robots_process import measure_robots
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.types import DayshiftError
from tests.engine.conftest import VOCAB_SIZE

LOAD = RobotsLoad(
    vocab_size=VOCAB_SIZE,
    duration_s=3.0,
    think_s=0.2,
    new_tokens=12,
    generated_tokens=4,
    history_tokens=300,
    system_tokens=40,
    window=256,
)


@pytest.fixture(scope="module")
def url(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room on the device for about five of the windows."""
    config = EngineConfig(
        model=str(tiny_model_dir),
        num_kv_blocks=80,
        window=256,
        restore="read",
        host_kv_bytes=1 << 20,
        store_dir=tmp_path_factory.mktemp("store"),
    )
    with running_server(config, ServerOptions(port=0, model_name="tiny", in_process=True)) as url:
        yield url


def rows_of(url: str, load: RobotsLoad, numbers: list[int], peer_model: str | None = None) -> list[RobotsRow]:
    return [item for item in measure_robots(url, load, numbers, peer_model) if isinstance(item, RobotsRow)]


def test_eight_robots_keep_their_sessions(url: str) -> None:
    few, many = rows_of(url, LOAD, [8, 2])
    assert (few.num_robots, many.num_robots) == (2, 8)
    for row in (few, many):
        assert row.num_calls > 0
        assert (row.num_failures, row.num_wrong_sessions) == (0, 0)
        assert 0 < row.first_token_p50_s <= row.p50_s <= row.p95_s
        assert 0 < row.token_gap_p95_s <= row.token_gap_p99_s
        # Nothing but the new turn is ever computed, wherever the session was meanwhile.
        assert row.computed_tokens == LOAD.new_tokens
        assert 100 < row.prompt_tokens <= LOAD.window
        assert row.sources is not None
        assert row.sources.recomputed == 0
        assert sum(asdict(row.sources).values()) == pytest.approx(1)
    assert few.sources == SourceShares(gpu=1.0, host=0.0, disk=0.0, recomputed=0.0)
    assert many.sources is not None
    assert many.sources.gpu < 1


def test_a_peer_is_sent_the_whole_history(url: str) -> None:
    (row,) = rows_of(url, replace(LOAD, window=64), [3], peer_model="tiny")
    assert row.num_failures == 0
    assert row.prompt_tokens > 0.4 * LOAD.history_tokens + LOAD.system_tokens
    assert row.computed_tokens == row.prompt_tokens
    assert row.sources == SourceShares(gpu=0.0, host=0.0, disk=0.0, recomputed=1.0)


def test_a_peers_robot_that_keeps_to_the_window(url: str) -> None:
    load = replace(LOAD, cuts_history=True)
    (row,) = rows_of(url, load, [3], peer_model="tiny")
    assert row.num_failures == 0
    assert row.num_calls > 6
    assert 0.75 * load.window - 3 * (load.new_tokens + load.generated_tokens) < row.prompt_tokens
    assert row.prompt_tokens + load.generated_tokens <= load.window


def test_a_server_that_refuses_is_one_line(url: str) -> None:
    with pytest.raises(DayshiftError, match=r"no call was answered with 1 robots: .*'nobody'") as caught:
        rows_of(url, replace(LOAD, duration_s=3.0, think_s=0.1), [1], peer_model="nobody")
    assert "\n" not in str(caught.value)


def test_a_server_that_is_not_there_is_one_line() -> None:
    with pytest.raises(DayshiftError, match=r"127\.0\.0\.1:1: All connection attempts failed"):
        rows_of("http://127.0.0.1:1", LOAD, [1])


def test_replies_are_counted_where_they_end() -> None:
    """Where robots wait for longer than is measured, hardly any call begins and ends in that time."""
    calls = [
        Call(started_at=float(begin), total_s=8.0, num_reused=1) for begin in (0, 1, 2, 3, 9, 10)
    ]  # end at 8, 9, 10, 11, 17, 18
    row = _row(6, calls, measured_from=6.0, end=12.0, loaded={"host": 0.0, "archive": 0.0})
    assert (row.num_calls, row.calls_per_s, row.p50_s) == (2, 4 / 6.0, 8.0)
