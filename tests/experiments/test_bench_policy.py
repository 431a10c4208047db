"""`dayshift bench policy` at its smallest: a policy and a planner in a real core, without HTTP."""

import json
import re
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dayshift.engine.action_api import ActionBody, ActionChunk
from dayshift.experiments.commands import bench_policy
from dayshift.experiments.commands.bench import app
from dayshift.experiments.policy_bench import BenchRow, BenchTarget


def test_robots_alone_and_beside_planners(capfd: pytest.CaptureFixture[str]):
    options = ["--checkpoint", "small", "--robots", "1,2", "--beside", "2x1", "--n-action-steps", "4"]
    result = CliRunner().invoke(
        app, ["policy", *options, "--seconds", "1", "--device", "cpu", "--no-http", "--json"]
    )
    assert result.exit_code == 0, result.output
    one, two, planner, both = json.loads(capfd.readouterr().out)["rows"]
    assert [(row["num_robots"], row["num_planners"]) for row in (one, two, planner, both)] == [
        (1, 0),
        (2, 0),
        (0, 1),
        (2, 1),
    ]
    assert one["mean_batch_size"] == 1
    assert 1.5 < two["mean_batch_size"] <= 2  # together, but for the first one, which had been alone
    assert one["chunk_p50_ms"] >= one["queued_p50_ms"] + 0.5 * one["infer_p50_ms"]
    assert planner["num_chunks"] == 0
    assert planner["chunk_p50_ms"] is None
    assert planner["token_p50_ms"] > 0
    assert both["num_chunks"] > 0
    assert both["token_p99_ratio"] == pytest.approx(both["token_p99_ms"] / planner["token_p99_ms"])


def test_a_terminal_of_80_columns_shows_every_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    row = BenchRow(
        policy="slices",
        num_robots=32,
        num_planners=8,
        is_paced=True,
        num_chunks=640,
        chunks_per_s=640.1,
        chunk_p50_ms=135.2,
        chunk_p95_ms=149.4,
        chunk_p99_ms=149.9,
        queued_p50_ms=110.3,
        infer_p50_ms=128.5,
        infer_p99_ms=131.6,
        mean_batch_size=23.7,
        num_tokens=1000,
        token_p50_ms=105.8,
        token_p99_ms=110.6,
        token_p50_ratio=1.01,
        token_p99_ratio=1.75,
    )
    monkeypatch.setenv("COLUMNS", "80")
    bench_policy._print([row, replace(row, policy="streams", token_p50_ratio=None)] * 5)
    printed = capsys.readouterr().out
    for number in re.findall(r"\d+\.\d+", repr(row)):
        assert len(re.findall(rf"\b{re.escape(number)}\b", printed)) == (5 if number == "1.01" else 10), (
            number
        )


@pytest.mark.parametrize(
    "option", ["--beside=8", "--beside=8xx8", "--beside=0x8", "--robots=one", "--sharing=time"]
)
def test_a_load_that_cannot_be_read_is_refused(option: str):
    result = CliRunner().invoke(app, ["policy", option])
    assert result.exit_code != 0
    assert option.partition("=")[0] in str(result.exception)


class MeetingClient:
    """Answers when all three robots have asked."""

    def __init__(self, together: threading.Barrier) -> None:
        self._together = together

    def act(self, policy: str, body: ActionBody) -> ActionChunk:
        self._together.wait(10)
        return ActionChunk(actions=(body.state,), queued_ms=0.0, infer_ms=0.0, batch_size=3)


def test_a_fleet_of_clients_asks_at_the_same_moment():
    together = threading.Barrier(3)
    target = BenchTarget.of_clients(lambda: nullcontext(MeetingClient(together)))  # type: ignore[arg-type]
    bodies = [ActionBody(images={}, state=(float(robot),), instruction="go") for robot in range(3)]
    with target.assemble(3) as fleet:
        for _ in range(2):
            answers = fleet.ask("arm", bodies)
            assert [chunk.actions for chunk, _ in answers] == [((0.0,),), ((1.0,),), ((2.0,),)]
            assert all(0 <= seconds < 10 for _, seconds in answers)
