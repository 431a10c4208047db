from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dayshift.engine.server.metrics import Metrics
from dayshift.webui.monitor import PERIOD_S, EngineGauges, MachineGauges, Monitor
from dayshift.webui.series import SeriesReader

STATS = {
    "num_running": 2,
    "num_waiting": 1,
    "num_sessions": 5,
    "num_parked_sessions": 3,
    "num_kv_blocks": 200,
    "num_free_kv_blocks": 150,
    "num_prompt_tokens_computed": 1000,
    "num_generated_tokens": 50,
    "num_recalled_tokens": 0,
    "num_restored_tokens": 0,
}


class MetricsServer(HTTPServer):
    """Serves what the engine's own `Metrics` renders for `stats`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.stats = dict(STATS)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, MetricsServer)
        if self.path != "/metrics":  # an engine that tells no more than its numbers
            self.send_error(404)
            return
        body = Metrics().render(self.server.stats)
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[MetricsServer]:
    with MetricsServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_gauges_and_rates_of_an_engine(engine: MetricsServer) -> None:
    gauges = EngineGauges(engine.url)
    first = gauges.sample(10.0)
    assert (first["batch_size"], first["waiting"], first["sessions"], first["sessions_parked"]) == (
        2,
        1,
        5,
        3,
    )
    assert first["kv_used_percent"] == pytest.approx(25)
    assert "generated_tokens_per_s" not in first  # a rate needs two samples
    engine.stats["num_generated_tokens"] += 30
    second = gauges.sample(12.0)
    assert second["generated_tokens_per_s"] == pytest.approx(15)
    assert second["computed_tokens_per_s"] == 0
    engine.stats["num_generated_tokens"] = 0  # the engine was started again
    assert gauges.sample(13.0)["generated_tokens_per_s"] == 0
    gauges.close()


def test_an_engine_that_does_not_answer_leaves_a_gap() -> None:
    gauges = EngineGauges("http://127.0.0.1:1")
    assert gauges.sample(1.0) == {}
    gauges.close()


def test_the_machine_says_its_load_and_memory() -> None:
    gauges = MachineGauges()
    sample = gauges.sample()
    assert 0 <= sample["cpu_percent"] <= 100
    assert sample["memory_gib"] > 0
    gauges.close()


def test_a_monitor_writes_while_it_lasts(tmp_path: Path, engine: MetricsServer) -> None:
    begin = time.monotonic()
    with Monitor(tmp_path, now=lambda: time.monotonic() - begin, engine_url=engine.url):
        time.sleep(3.5 * PERIOD_S)
    reader = SeriesReader(tmp_path)
    reader.refresh()
    assert {"batch_size", "kv_used_percent", "cpu_percent", "memory_gib"} <= set(reader.names)
    t, _, high = reader.window("batch_size", 0, 100, 100)
    assert len(t) >= 1
    assert set(high) == {2.0}
