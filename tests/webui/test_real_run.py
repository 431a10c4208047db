"""A real run, by clicks: started, asked, stopped, resumed, watched to its end; simulator, engine and all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from dayshift.webui.build import build_page
from tests.webui.browser import chromium, needs_chromium, open_page

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.timeout(1200)]
MINUTES = 60_000
EXPERIMENT = """name: small
plan:
  shifts:
    - - [turn on the stove, put the bowl on the stove]
      - [push the plate to the front of the stove, put the bowl on the plate]
planner: {window: 768}
rules: {max_attempts: 1}
sim: {num_init_states: 10, camera_hz: 5, max_steps: 120}
"""


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """`dayshift ui`, as its user starts it."""
    build_page()
    process = subprocess.Popen(
        [sys.executable, "-m", "dayshift", "ui", str(tmp_path / "runs"), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    yield process.stderr.readline().split()[-1]
    process.terminate()
    process.wait(timeout=30)
    process.stderr.close()


def test_a_run_is_started_asked_stopped_resumed_and_watched_to_its_end(address: str) -> None:
    with chromium() as browser, open_page(browser, address) as page:
        page.get_by_role("button", name="New run").click()
        page.get_by_label("YAML", exact=True).fill(EXPERIMENT)
        page.get_by_role("dialog").get_by_role("button", name="Start").click()
        badge = page.locator(".badge")
        expect(badge).to_have_text("live", timeout=3 * MINUTES)
        expect(page.locator(".exchange .verb").first).to_have_text("execute", timeout=3 * MINUTES)
        expect(page.locator(".tile-frame").first).to_contain_text("/", timeout=3 * MINUTES)

        page.get_by_role("tab", name="Sessions").click()
        page.locator(".session-head").first.click()
        page.get_by_label("Question").fill("Review of shift 1: list every step given up in shift 1.")
        page.get_by_role("button", name="Ask the planner").click()
        expect(page.locator(".ask .reply")).to_contain_text("redo", timeout=MINUTES)
        expect(page.locator(".session")).to_have_count(1)  # the copy that was asked is gone
        page.get_by_role("button", name="Fork").click()
        expect(page.locator(".session")).to_have_count(2, timeout=MINUTES)

        page.get_by_role("button", name="Stop").click()
        page.get_by_role("dialog").get_by_role("button", name="Stop").click()
        expect(badge).to_have_text("recorded", timeout=2 * MINUTES)
        page.get_by_role("button", name="Resume").click()
        expect(badge).to_have_text("live", timeout=3 * MINUTES)
        expect(badge).to_have_text("recorded", timeout=8 * MINUTES)

        # Watched to its end: every step is over, engine and machine were sampled, pictures are there.
        expect(page.locator("button.cell.pending")).to_have_count(0)
        expect(page.locator(".gutter-title", has_text="tokens")).to_be_visible()
        page.get_by_role("tab", name="Log").click()
        expect(page.locator(".log-row.hours", has_text="review of shift 1 ends")).to_be_visible()
        expect(page.locator(".tile-frame").first).to_contain_text("/")
