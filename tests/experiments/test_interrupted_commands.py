"""Every command ends with one line and leaves no process, at whatever moment it is told to."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import httpx
import pytest

from .conftest import Terminal

STEPS = ["turn on the stove", "put the bowl on the stove"]
COMMANDS = {
    "serve": ["serve", "--port", "0", "--store-dir", "store"],
    "two engines": ["serve", "--port", "0", "--data-parallel", "2", "--store-dir", "store"],
    "router": ["router", "--port", "0", "--engine", "http://127.0.0.1:9"],
    "ui": ["ui", "--port", "0"],
    "show": ["show", "dataset", "--port", "0"],
    "run --ui": ["run", "long.yaml", "--ui", "--runs-dir", "more-{number}"],
    "run, default planner": ["run", "quickstart", "--runs-dir", "more-{number}"],
    "eval": ["eval", "--policy", "expert", "--trials", "4", "--image-size", "64", "--videos", "all",
             "--out", "eval-{number}"],
    "export": ["export", "run", "--to", "dataset-{number}"],
    "verify": ["verify", "dataset", "--lerobot"],
    "prerender": ["prerender", "run"],
    "render": ["render", "run", "-o", "film.mp4"],
    "models": ["models", "inspect", "default"],
    "doctor": ["doctor"],
    "bench ttft": ["bench", "ttft", "--in-process"],
    "bench startup": ["bench", "startup"],
    "bench robots": ["bench", "robots", "--model", "default", "--robots", "2", "--window", "768",
                     "--history", "1000"],
    "bench record": ["bench", "record", "run"],
    "bench kv": ["bench", "kv"],
    "bench restore": ["bench", "restore"],
    "bench speculation": ["bench", "speculation"],
}  # fmt: skip
ENDS = [Terminal.press_ctrl_c, Terminal.press_ctrl_c_twice, Terminal.terminate, Terminal.close_window]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_command_that_is_still_importing_says_one_line(terminal, end, after_s) -> None:
    command = terminal("models", "ls")
    command.wait_until_it_handles_signals()
    time.sleep(after_s)
    end(command)
    assert command.end() == (130, "")
    assert command.lines == ["dayshift: interrupted"]


@pytest.mark.parametrize("end", ENDS)
def test_a_server_ends_without_a_word(terminal, end) -> None:
    command = terminal("ui", "--port", "0")
    command.wait_for("the page is at")
    end(command)
    assert command.end() == (0, "")
    assert len(command.lines) == 1


@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGHUP, Terminal.close_window), (signal.SIGINT, Terminal.press_ctrl_c)],
    ids=["nohup", "in a script's background"],
)
def test_a_server_goes_on_ignoring_what_its_caller_ignored(terminal, number, send) -> None:
    found = signal.signal(number, signal.SIG_IGN)
    try:
        command = terminal("router", "--port", "0", "--engine", "http://127.0.0.1:9")
    finally:
        signal.signal(number, found)
    url = command.wait_for("routing to").split()[-1]
    send(command)
    assert httpx.get(f"{url}/health").status_code == 503  # it answers: the engine is not there
    command.terminate()
    assert command.end() == (0, "")


@pytest.fixture
def folder(terminal, tmp_path: Path) -> Path:
    """With a run, a dataset, and a long experiment."""
    (tmp_path / "two.yaml").write_text(f"planner: {{memory: oracle}}\nplan: {{shifts: {[[STEPS]]}}}\n")
    (tmp_path / "long.yaml").write_text(f"extends: two.yaml\nplan: {{shifts: {[[STEPS] * 20]}}}\n")
    assert terminal("run", "two.yaml").end()[0] == 0
    (made,) = (tmp_path / "runs").iterdir()
    made.rename(tmp_path / "run")
    assert terminal("export", "run", "--to", "dataset").end()[0] == 0
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_is_ended_at_any_moment_says_one_line_and_leaves_no_process(
    terminal, folder, name
) -> None:
    rng = random.Random(name)
    for number in range(8):
        command = terminal(*(word.format(number=number) for word in COMMANDS[name]))
        command.wait_until_it_handles_signals()
        time.sleep(rng.uniform(0.0, 12.0))
        processes = command.descendants()
        rng.choice(ENDS)(command)
        code, _ = command.end()
        assert code in (0, 130), command.lines  # 0: it was over, or is a server
        assert not re.search("Traceback|ignored|leaked", "\n".join(command.lines)), command.lines
        assert code == 0 or command.lines[-1].startswith("dayshift: interrupted"), command.lines
        assert command.still_alive(processes) == set()
