"""The page through a router: two engines, one address; what it shows and does is the engines'."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from dayshift.engine.api import Message, SamplingParams, SessionConfig, SessionInfo, TurnRequest
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.router import running_router
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.experiments.planners import default_model_folder
from dayshift.types import RunClock
from dayshift.webui.app import PageOptions
from dayshift.webui.build import build_page
from dayshift.webui.monitor import Monitor
from dayshift.webui.publisher import LivePublisher
from dayshift.webui.server import running_page
from tests.webui.browser import chromium, needs_chromium, open_page
from tests.webui.made_runs import MadeRun
from tests.webui.socket_client import SocketClient

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_TURNS = 3


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Two engines on one store, with the planner that Dayshift brings."""
    config = EngineConfig(
        model=str(default_model_folder()),
        kv_cache_bytes=64 << 20,
        window=512,
        store_dir=tmp_path / "store",
    )
    options = ServerOptions(port=0, in_process=True)
    with running_server(config, options) as first, running_server(config, options) as second:
        yield first, second


def talk(client: DayshiftClient, session_id: str, clock: RunClock) -> None:
    client.open_session(SessionConfig(session_id=session_id, system="You lead a robot."))
    for _ in range(NUM_TURNS):
        client.turn(
            TurnRequest(
                request_id=uuid.uuid4().hex,
                session_id=session_id,
                at=clock.now(),
                messages=(Message("user", "Shift 1, job 1, step 1: turn on the stove."),),
                sampling=SamplingParams(max_tokens=12),
            )
        )


def test_sessions_requests_and_acts_of_all_engines_behind_one_address(
    engines: tuple[str, str], tmp_path: Path
) -> None:
    build_page()
    run_dir = MadeRun(tmp_path / "runs" / "made", operation_s=4, num_recorded=1, series_hz=0).build()
    clock = RunClock(offset_s=20.0)
    with (
        running_router(engines) as router_url,
        LivePublisher(run_dir, now=clock.now, engine_url=router_url),
        Monitor(run_dir, now=clock.now, engine_url=router_url),
        DayshiftClient(router_url) as client,
        running_page(PageOptions(runs_dir=run_dir.parent, port=0)) as address,
    ):
        for number in (1, 2):
            talk(client, f"made-robot-{number}", clock)
        held_by = [[one.session_id for one in _sessions_in_memory(url)] for url in engines]
        assert sorted(map(len, held_by)) == [1, 1]  # each engine has one of them
        with chromium() as browser, open_page(browser, address) as page:
            expect(page.locator(".badge")).to_have_text("live")
            page.get_by_role("tab", name="Sessions").click()
            expect(page.locator(".session-head b")).to_have_text(["made-robot-1", "made-robot-2"])
            for number in (1, 2):
                page.locator(".session-head", has_text=f"made-robot-{number}").click()
                page.get_by_label("Question").fill("Review of shift 1: list every step given up in shift 1.")
                page.get_by_role("button", name="Ask the planner").click()
                expect(page.locator(".ask .reply")).to_contain_text("computed")
                page.locator(".session-head", has_text=f"made-robot-{number}").click()
            page.locator(".session-head", has_text="made-robot-1").click()
            num_turns = len(client.session("made-robot-1").turns)
            page.get_by_label("in the session itself").check()
            page.get_by_label("Question").fill("Result: done.")
            for answer in ("Cancel", "Ask"):  # it becomes a turn of the session, so it is confirmed first
                page.get_by_role("button", name="Ask the planner").click()
                page.get_by_role("dialog").get_by_role("button", name=answer).click()
                if answer == "Cancel":
                    assert len(client.session("made-robot-1").turns) == num_turns
            expect(page.locator(".ask .reply")).to_contain_text("computed")
            assert len(client.session("made-robot-1").turns) == num_turns + 1
            page.get_by_role("button", name="Fork").click()
            expect(page.locator(".session")).to_have_count(3)
            page.get_by_role("button", name="Park").click()
            parked = page.locator(".sessions section", has_text="parked")
            expect(parked.get_by_text("made-robot-1", exact=True)).to_be_visible()
            expect(page.locator(".gutter-title", has_text="tokens")).to_be_visible()
    _assert_recorded(run_dir)


def _sessions_in_memory(url: str) -> list[SessionInfo]:
    with DayshiftClient(url) as client:
        return [one for one in client.sessions() if not one.is_parked]


def _assert_recorded(run_dir: Path) -> None:
    """After the run: what both engines told is in its folder, on its clock."""
    with running_page(PageOptions(runs_dir=run_dir.parent, port=0)) as address, SocketClient(address) as page:
        page.ask("open", run="made")
        rows = page.ask("lanes", from_s=20, to_s=600, width=500)["rows"]
        by_robot = [row[8] for row in rows]
        asked = {"robot-1": NUM_TURNS + 1, "robot-2": NUM_TURNS}  # one was asked from the page
        assert {robot: by_robot.count(robot) for robot in asked} == asked
        assert by_robot.count("") == 2  # the questions, asked in copies
        assert all(20 <= row[1] <= row[2] for row in rows)
        last = {one["session_id"]: one for one in page.ask("sessions_at", t=1e6)}
        assert last["made-robot-1"]["is_parked"]
        assert last["made-robot-2"]["num_turns"] == NUM_TURNS
        assert page.ask("sessions_at", t=20.0) == []
