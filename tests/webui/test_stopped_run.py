"""A real run that a page started, stopped through the page's websocket: no browser, simulator and all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dayshift.dataset_export.run_folder import open_run
from tests.webui.socket_client import SocketClient

EXPERIMENT = f"""name: long
planner: {{memory: oracle}}
plan: {{shifts: {[[["turn on the stove", "put the bowl on the stove"]] * 20]}}}
sim: {{camera_hz: 1}}
"""


class Command:
    """`dayshift ARGUMENTS`, which serves a page."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dayshift", *arguments], stderr=subprocess.PIPE, text=True
        )
        self.address = self.line_with("the page is at").split()[-1]

    def line_with(self, text: str) -> str:
        assert self._process.stderr is not None
        return next(line for line in self._process.stderr if text in line)

    def wait(self) -> int:
        return self._process.wait(60)

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)


@pytest.fixture
def command() -> Iterator[Callable[..., Command]]:
    started: list[Command] = []

    def start(*arguments: str) -> Command:
        started.append(Command(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.close()


def wait_until(is_so: Callable[[], Any]) -> None:
    give_up_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.1)


def stop_while_live(page: SocketClient, run: str) -> None:
    wait_until(lambda: (page.reply("open", run=run)["body"] or {}).get("is_live"))
    page.ask("stop")
    wait_until(lambda: not page.ask("open", run=run)["is_live"])


def said_at_the_end(run_dir: Path) -> str:
    return f"dayshift: interrupted; what is recorded is kept, go on with: dayshift run --resume {run_dir}"


def last_lines(runs_dir: Path) -> list[str]:
    """What each run that a page started said last."""
    logs = sorted((runs_dir / ".started").glob("*.log"))
    return [log.read_text().splitlines()[-1] for log in logs if log.read_text()]


def test_the_page_of_a_run_stops_it(command, tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_text(EXPERIMENT)
    runs_dir = tmp_path / "runs"
    shown = command("run", str(tmp_path / "long.yaml"), "--ui", "--runs-dir", str(runs_dir))
    address, _, run = shown.address.partition("#run=")
    with SocketClient(address) as page:
        stop_while_live(page, run)
    assert shown.line_with("dayshift: ") == f"{said_at_the_end(runs_dir / run)}\n"
    assert shown.wait() == 130


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("ui", "."), ("run", "long.yaml", "--ui", "--runs-dir", ".")])
def test_a_run_that_a_page_started_is_stopped_resumed_and_stopped_from_it(
    command, tmp_path: Path, monkeypatch, arguments
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("long.yaml").write_text(EXPERIMENT)
    port = "--port" if "ui" in arguments else "--ui-port"
    with SocketClient(command(*arguments, port, "0").address) as page:
        run = page.ask("start", yaml=EXPERIMENT)
        stop_while_live(page, run)
        page.ask("resume")
        stop_while_live(page, run)
    wait_until(lambda: last_lines(tmp_path) == [said_at_the_end(tmp_path / run)] * 2)
    with open_run(tmp_path / run) as folder:
        num_frames = {each.attempt.attempt_id: len(each.frames()) for each in folder.recorded_attempts()}
        assert num_frames == {each.attempt_id: each.num_control_steps for each in folder.attempts()}
