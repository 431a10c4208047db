"""The quickstart, watched live in a browser from start to end, as `make demo` runs it."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dayshift.webui.build import build_page
from tests.webui.browser import chromium, needs_chromium, open_page

pytestmark = [needs_chromium, pytest.mark.slow, pytest.mark.timeout(1800)]
MINUTES = 60_000
LOOK_EVERY_MS = 1000


class Quickstart:
    """`dayshift run quickstart --ui` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "dayshift", "run", "quickstart", "--ui", "--keep-ui", "--json"]
        self._results, self._said = folder / "results", folder / "said"
        with self._results.open("wb") as results, self._said.open("wb") as said:
            self._process = subprocess.Popen(command, cwd=folder, stdout=results, stderr=said)
        self.address = self._line_with("the page is at").split()[-1]

    def _line_with(self, words: str) -> str:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for line in self._said.read_text().splitlines():
                if words in line:
                    return line
            time.sleep(0.1)
        raise AssertionError(f"the run has not said {words!r}")

    def results(self) -> dict:
        return json.loads(self._results.read_text())

    def end(self) -> str:
        """Ctrl-C on the page that stayed; the last line that was said."""
        self._process.send_signal(signal.SIGINT)
        assert self._process.wait(60) == 0
        return self._line_with("look at it again")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def quickstart(tmp_path: Path) -> Iterator[Quickstart]:
    build_page()
    run = Quickstart(tmp_path)
    yield run
    run.kill()


def look(page: Page) -> tuple[float, str, str]:
    """The clock, the control step that the camera shows, and what is said of the run."""
    scrubber = float(page.locator(".scrubber").input_value())
    return scrubber, page.locator(".tile-frame").inner_text(), page.locator(".badge").inner_text()


def test_the_quickstart_is_watched_from_start_to_end(quickstart: Quickstart, tmp_path: Path) -> None:
    with chromium() as browser, open_page(browser, quickstart.address) as page:
        badge = page.locator(".badge")
        expect(badge).to_have_text("live", timeout=5 * MINUTES)
        seen = [look(page)]
        while seen[-1][2] == "live":
            page.wait_for_timeout(LOOK_EVERY_MS)
            seen.append(look(page))
            if len(seen) % 15 == 1:
                page.screenshot(path=tmp_path / f"live-{len(seen):03}.png")
        times = [t for t, _, _ in seen]
        assert times == sorted(times)  # the clock never jumps back

        # What the page says at the end is what the run itself counted.
        results = quickstart_results(quickstart, page)
        num_moves = sum(before[1] != after[1] for before, after in itertools.pairwise(seen))
        assert num_moves > results["attempts"]  # the cameras moved with the clock, in every attempt
        for name, count in (("done", "steps_completed"), ("redone", "redone")):
            shown = page.locator(f".totals dd.{name}").inner_text().split("/")[0]
            assert int(shown) == results[count], name
        expect(page.locator("button.cell.pending")).to_have_count(0)

        # Replay: requests as the engine traced them, sessions as they stood.
        page.get_by_role("tab", name="Sessions").click()
        page.keyboard.press("Home")
        expect(page.locator(".session")).to_have_count(0)
        page.keyboard.press("m")
        expect(page.locator(".session")).to_have_count(1)
        page.keyboard.press("m")  # the second recall: what left the window for the first is in the record now
        expect(page.locator(".session-numbers")).to_contain_text("archived")
        page.screenshot(path=tmp_path / "replay-sessions.png")
        page.get_by_role("tab", name="Planner").click()
        expect(page.locator(".exchange.is-focused .recalled-turns summary")).to_be_visible()
        page.screenshot(path=tmp_path / "replay-recall.png")
    run_dir = tmp_path / results["run_dir"]
    assert (run_dir / "requests.jsonl").stat().st_size > 0
    assert str(run_dir.name) in quickstart.end()
    assert not (run_dir / "live.sock").exists()


def quickstart_results(quickstart: Quickstart, page: Page) -> dict:
    """The run prints its results a moment after it has ended."""
    for _ in range(1200):  # what it started is closed first
        try:
            return quickstart.results()
        except json.JSONDecodeError:
            page.wait_for_timeout(100)
    raise AssertionError("no results")
