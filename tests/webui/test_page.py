"""What the page does, by clicks and keys in a real browser."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from dayshift.dataset_export.store import DATABASE
from dayshift.types import DayshiftError, RunClock
from dayshift.webui.app import PageOptions
from dayshift.webui.build import build_page
from dayshift.webui.launcher import LaunchedRun
from dayshift.webui.publisher import LivePublisher
from dayshift.webui.run_index import RunIndex
from dayshift.webui.server import running_page
from tests.webui.browser import chromium, needs_chromium, open_page
from tests.webui.made_runs import MadeRun

pytestmark = needs_chromium


class OneExperiment:
    """A launcher that knows a small schema and starts nothing."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {
                "name": {"type": "string", "default": "experiment", "description": "Begins the name."},
                "robots": {"$ref": "#/$defs/Robots", "default": {"live": 1}},
            },
            "$defs": {
                "Robots": {
                    "description": "The robots.",
                    "type": "object",
                    "properties": {"live": {"type": "integer", "minimum": 1, "maximum": 99, "default": 1}},
                }
            },
        }

    def experiments(self) -> dict[str, str]:
        return {"quickstart": "name: quickstart\n"}

    def check(self, yaml: str) -> None:
        if "typo" in yaml:
            raise DayshiftError("line 1: typo: unknown key, allowed: name, robots")

    def start(self, yaml: str) -> LaunchedRun:
        self.started.append(yaml)
        raise DayshiftError("no simulator in this test")

    def resume(self, run_dir: Path) -> LaunchedRun:
        self.started.append(f"resume {run_dir.name}")
        return LaunchedRun(run_dir=run_dir, process_id=0)


@pytest.fixture(scope="module")
def launcher() -> OneExperiment:
    return OneExperiment()


@pytest.fixture(scope="module")
def shown_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `made_run`, with a picture for every control step: nothing has to be rendered."""
    runs = tmp_path_factory.mktemp("page") / "runs"
    return MadeRun(runs / "made", operation_s=20, num_recorded=20, images_every=1).build()


@pytest.fixture(scope="module")
def address(shown_run: Path, launcher: OneExperiment) -> Iterator[str]:
    build_page()
    with running_page(PageOptions(runs_dir=shown_run.parent, launcher=launcher, port=0)) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with open_page(browser, f"{address}#run=made&t=3") as page:
        expect(page.locator(".tile-frame").first).to_contain_text("/40")
        yield page


def clock_of(page: Page) -> float:
    hours, minutes, seconds = page.locator(".clock").inner_text().split("/")[0].strip().split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def expect_clock(page: Page, t: float) -> None:
    """The page's clock comes to show `t`; it may have to ask for the moment first."""
    deadline = time.monotonic() + 10
    while clock_of(page) != pytest.approx(t, abs=0.11) and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    assert clock_of(page) == pytest.approx(t, abs=0.11)


def seek(page: Page, t: float) -> None:
    page.locator(".scrubber").evaluate(
        "(e, t) => { e.value = t; e.dispatchEvent(new Event('input', {bubbles: true})); }", t
    )


def red_column(page: Page, camera: str = "robot-1, agentview camera") -> float:
    """Where the bright square of a made picture is on a camera's canvas."""
    return page.get_by_role("img", name=camera).evaluate(
        """(canvas) => {
            const {data, width} = canvas.getContext("2d").getImageData(0, 28, canvas.width, 1);
            let sum = 0, count = 0;
            for (let x = 0; x < width; x++) if (data[4*x] > 180 && data[4*x+1] < 120) { sum += x; count++; }
            return count ? sum / count : -1;
        }"""
    )


def test_cameras_board_planner_and_time_lines_show_one_moment(page: Page) -> None:
    expect(page.get_by_role("img", name=re.compile("camera$"))).to_have_count(4)
    assert red_column(page) > 0
    expect(page.get_by_label(re.compile("robot-1 step 1.1.1, .*: running"))).to_be_visible()
    expect(page.locator(".exchange")).to_have_count(1)
    seek(page, 1000)  # beyond the end: the last moment
    expect(page.get_by_label(re.compile("robot-1 step 1.1.2, .*: given up, then redone"))).to_be_visible()
    expect(page.locator(".exchange .verb.redo").first).to_be_visible()
    expect(page.locator(".totals dd.redone")).not_to_have_text("0")


def test_frames_are_stepped_exactly(page: Page, shown_run: Path) -> None:
    index = RunIndex(shown_run)
    frame = page.locator(".tile.selected .tile-frame")
    number = int(frame.inner_text().split("/")[0])
    for _ in range(5):
        page.keyboard.press("ArrowRight")
        number += 1
        expect(frame).to_have_text(f"{number}/40")
    page.get_by_role("button", name="One frame back").click()
    expect(frame).to_have_text(f"{number - 1}/40")
    shown = number - 2  # counted from 0; the picture is mirrored back
    assert red_column(page) == pytest.approx(63 - (16 + shown + 3.5), abs=1)
    index.close()


def test_it_plays_at_the_chosen_speed_and_pauses(page: Page) -> None:
    seek(page, 1)
    page.get_by_label("speed", exact=True).select_option("5")
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.wait_for_function("() => parseFloat(document.querySelector('.scrubber').value) > 4")
    page.keyboard.press("Space")
    paused = clock_of(page)
    page.wait_for_timeout(300)
    assert clock_of(page) == paused


def test_reviews_have_their_own_speed(page: Page, shown_run: Path) -> None:
    index = RunIndex(shown_run)
    review = next(one for one in index.robot("robot-1").hours if one.is_review)
    index.close()
    page.get_by_label("speed", exact=True).select_option("0.25")
    page.get_by_label("in reviews", exact=True).select_option("20")
    seek(page, review.start_s + 0.1)
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.locator(".speeds label.active")).to_contain_text("in reviews")
    page.wait_for_function(
        "(t) => parseFloat(document.querySelector('.scrubber').value) > t", arg=review.start_s + 3
    )


def test_jumps_lead_to_failure_review_and_recall(page: Page, shown_run: Path) -> None:
    index = RunIndex(shown_run)
    seek(page, 0)
    page.get_by_role("button", name="Next failure").click()
    expect_clock(page, index.jumps("failure")[0].t)
    page.keyboard.press("r")
    expect_clock(page, index.jumps("review")[0].t)
    page.keyboard.press("m")
    expect(page.locator(".exchange.is-focused .recalled-turns summary")).to_contain_text("recalled 6 turns")
    page.keyboard.press("Shift+F")
    page.wait_for_timeout(300)
    before = [jump.t for jump in index.jumps("failure") if jump.t < index.jumps("recall")[0].t]
    expect_clock(page, before[-1])
    index.close()


def test_a_failed_step_is_one_click_from_its_frames_words_requests_and_recall(page: Page) -> None:
    seek(page, 1000)
    page.get_by_label(re.compile("robot-1 step 1.1.2")).click()
    panel = page.get_by_role("region", name="Step 1.1.2")
    expect(panel.get_by_role("button", name=re.compile("^attempt 1 failed"))).to_be_visible()
    panel.get_by_role("button", name=re.compile("^attempt 2 failed")).click()
    expect(panel.get_by_text("given up · attempts")).to_be_visible()
    expect(panel.locator(".verb.give-up")).to_be_visible()
    expect(panel.get_by_role("table")).to_contain_text("prefill")
    # Frames: the panel's slider moves cameras and clock.
    panel.get_by_label("Frame of the attempt").evaluate(
        "e => { e.value = 7; e.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    expect(page.locator(".tile.selected .tile-frame")).to_have_text("8/40")
    page.keyboard.press("Escape")
    expect(panel).to_be_hidden()


def test_what_was_recalled_can_be_read_where_it_was_recalled(page: Page) -> None:
    seek(page, 0)
    page.keyboard.press("m")
    turns = page.locator(".exchange.is-focused .recalled-turns")
    turns.locator("summary").click()
    expect(turns.locator("li")).to_have_count(6)
    expect(turns.locator("li").first).to_contain_text("Shift 1, job 1, step 1")
    expect(page.locator(".exchange.is-recalled").first).to_be_visible()


def test_the_time_axis_zooms_moves_and_goes_where_it_is_clicked(page: Page) -> None:
    axis = page.locator(".timeline-body")
    box = axis.bounding_box()
    assert box is not None
    middle = box["x"] + 116 + (box["width"] - 116) / 2
    hint = page.locator(".timelines .hint")
    whole = hint.inner_text()
    page.mouse.move(middle, box["y"] + 30)
    expect(page.locator(".cursors .hover")).to_be_visible()
    page.mouse.wheel(0, -600)
    expect(hint).not_to_have_text(whole)
    page.mouse.click(middle, box["y"] + 30)
    clicked = clock_of(page)
    hovered = page.locator(".cursors .hover span").inner_text()
    minutes, seconds = hovered.split(":")[1:]
    assert clicked == pytest.approx(int(minutes) * 60 + float(seconds), abs=0.3)
    page.get_by_role("button", name="whole run").click()
    expect(hint).to_have_text(whole)


def test_the_log_follows_the_clock_and_leads_to_what_happened(page: Page) -> None:
    page.get_by_role("tab", name="Log").click()
    seek(page, 1000)
    expect(page.locator(".log-row.is-future")).to_have_count(0)
    page.locator(".log-row.failed").first.click()
    expect(page.get_by_role("region", name="Step 1.1.2")).to_be_visible()


def test_the_address_leads_back_to_the_same_place(page: Page, browser: Browser) -> None:
    seek(page, 1000)
    page.get_by_label(re.compile("robot-2 step 1.1.2")).click()
    page.wait_for_function("() => location.hash.includes('attempt=')")
    with open_page(browser, page.url) as other:
        expect(other.get_by_role("region", name="Step 1.1.2")).to_contain_text("robot-2")
        expect(other.locator(".clock")).to_have_text(page.locator(".clock").inner_text())


def test_robots_are_selected_by_click_and_key(page: Page) -> None:
    page.get_by_role("button", name="Select robot-2").click()
    expect(page.get_by_role("tab", name="Planner")).to_contain_text("robot-2")
    page.keyboard.press("[")
    expect(page.get_by_role("tab", name="Planner")).to_contain_text("robot-1")


def test_light_and_dark(page: Page) -> None:
    before = page.locator("html").get_attribute("data-theme")
    page.keyboard.press("t")
    after = page.locator("html").get_attribute("data-theme")
    assert {before, after} == {"light", "dark"}
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", after or "")


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_screen(browser: Browser, address: str, width: int) -> None:
    with open_page(browser, f"{address}#run=made&t=3", width=width, height=800) as page:
        expect(page.locator(".tile-frame").first).to_contain_text("/40")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.get_by_role("button", name="Next failure").click()
        page.get_by_role("tab", name="Log").click()
        expect(page.locator(".log-row").first).to_be_visible()


@pytest.mark.parametrize("width", [320, 400, 860, 861, 1100, 1280])
def test_the_transport_of_a_live_run_covers_and_cuts_nothing(
    browser: Browser, address: str, shown_run: Path, width: int
) -> None:
    with (
        LivePublisher(shown_run, now=RunClock(offset_s=30.0).now, engine_url=None),
        open_page(browser, f"{address}#run=made", width=width, height=800) as page,
    ):
        expect(page.get_by_role("button", name="Live")).to_be_visible()
        covered = page.evaluate(
            """() => {
                const parts = [...document.querySelectorAll(".transport :is(button, output, input, select)")];
                const places = parts.map((e) => e.getBoundingClientRect());
                const name = (e) => e.ariaLabel ?? e.innerText;
                const cut = parts.filter((e) => e.scrollWidth > e.clientWidth + 1 && e.tagName !== "INPUT");
                return cut.map(name).concat(parts.flatMap((e, i) => parts.slice(i + 1).filter((_, k) => {
                    const [a, b] = [places[i], places[i + 1 + k]];
                    return Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
                        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
                }).map((other) => `${name(e)}, ${name(other)}`)));
            }"""
        )
        assert covered == []


def test_a_place_is_shown_whole_where_pictures_are_decoded_slowly(browser: Browser, tmp_path: Path) -> None:
    build_page()
    made = MadeRun(tmp_path / "runs" / "made", num_robots=1, operation_s=20, num_recorded=4, images_every=1)
    options = PageOptions(runs_dir=made.build().parent, port=0)
    with running_page(options) as address, open_page(browser, f"{address}#run=made&t=3") as page:
        page.add_init_script(
            """const decode = createImageBitmap;
            window.createImageBitmap = async (picture) => {
                await new Promise((done) => setTimeout(done, 300));
                return decode(picture);
            };"""
        )
        page.reload()
        expect(page.locator(".exchange")).to_have_count(1)
        expect(page.locator(".timelines canvas").first).to_be_visible()


def test_every_button_and_field_has_a_name(page: Page) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [role=img]")]
            .filter((e) => !(e.ariaLabel || e.innerText?.trim() || e.title || e.labels?.length))
            .map((e) => e.outerHTML.slice(0, 120))"""
    )
    assert nameless == []


def test_an_experiment_is_started_from_yaml_or_form(page: Page, launcher: OneExperiment) -> None:
    page.get_by_role("button", name="New run").click()
    dialog = page.get_by_role("dialog")
    yaml = dialog.get_by_label("YAML", exact=True)
    expect(yaml).to_have_value("name: quickstart\n")
    yaml.fill("typo: 1\n")
    dialog.get_by_role("button", name="Start").click()
    expect(dialog.get_by_role("alert")).to_have_text("line 1: typo: unknown key, allowed: name, robots")
    dialog.get_by_role("tab", name="Form").click()
    dialog.get_by_label("robots.live").fill("3")
    dialog.get_by_label("name", exact=True).fill("mine")
    dialog.get_by_role("button", name="Start").click()
    expect(page.locator(".message-problem")).to_contain_text("no simulator in this test")
    assert launcher.started[-1] == 'name: "mine"\nrobots:\n  live: 3\n'


def test_a_stopped_run_is_resumed_and_a_finished_one_is_not(
    page: Page, browser: Browser, address: str, shown_run: Path, launcher: OneExperiment
) -> None:
    expect(page.get_by_role("button", name="Resume")).to_have_count(0)
    stopped = MadeRun(shown_run.parent / "stopped", num_robots=1, operation_s=4, num_recorded=0).build()
    with contextlib.closing(sqlite3.connect(stopped / DATABASE)) as database, database:
        database.execute("UPDATE shifts SET end_s = NULL WHERE is_review")
    with open_page(browser, f"{address}#run=stopped") as other:
        other.get_by_role("button", name="Resume").click()
        expect(other.locator(".message-notice")).to_contain_text("the run goes on")
    assert launcher.started[-1] == "resume stopped"


def test_a_run_that_is_not_there_yet_is_waited_for(browser: Browser, address: str, shown_run: Path) -> None:
    with open_page(browser, f"{address}#run=later") as page:
        expect(page.locator("main")).to_contain_text("later: no such run")
        MadeRun(shown_run.parent / "later", num_robots=1, operation_s=4, num_recorded=0).build()
        expect(page.locator(".badge")).to_have_text("recorded")


def test_a_read_only_page_offers_nothing_that_changes_anything(browser: Browser, shown_run: Path) -> None:
    options = PageOptions(runs_dir=shown_run.parent, port=0, is_read_only=True)
    with running_page(options) as address, open_page(browser, f"{address}#run=made&t=3") as page:
        expect(page.locator(".tile-frame").first).to_contain_text("/40")
        buttons = page.locator(".acts button").all_inner_texts()
        assert [text for text in buttons if text.strip()] == []


def test_a_page_with_a_key_opens_by_its_address_or_by_asking(browser: Browser, shown_run: Path) -> None:
    options = PageOptions(runs_dir=shown_run.parent, port=0, api_key="s3cret")
    with running_page(options) as address:
        with open_page(browser, f"{address}#run=made&t=3") as page:
            expect(page.locator(".tile-frame").first).to_contain_text("/40")
            assert "s3cret" not in page.url
        # No `open_page`: the browser logs the refusal.
        page = browser.new_page()
        page.goto(address.partition("?")[0])
        page.get_by_label("Key").fill("s3cret")
        page.get_by_role("button", name="Open").click()
        expect(page.locator(".badge")).to_have_text("recorded")
        page.close()


def test_what_a_person_without_a_mouse_meets_has_a_place_and_can_be_pressed(page: Page) -> None:
    names = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        names.add(page.evaluate("document.activeElement.ariaLabel ?? document.activeElement.innerText"))
    for name in ("New run", "Save as", "Select robot-1", "Play", "Next failure", "Moment of the run"):
        assert any(name in (found or "") for found in names), name
    page.get_by_role("button", name="Keyboard").press("Enter")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_speeds_go_from_a_quarter_to_sixty(page: Page) -> None:
    speeds = page.get_by_label("speed", exact=True).locator("option").all_inner_texts()
    assert (speeds[0], speeds[-1]) == ("0.25×", "60×")
    seek(page, 1)
    page.get_by_label("speed", exact=True).select_option("60")
    page.keyboard.press("Space")
    page.wait_for_function("() => parseFloat(document.querySelector('.scrubber').value) > 15")
    page.keyboard.press("-")
    expect(page.get_by_label("speed", exact=True)).not_to_have_value("60")


def test_sessions_of_a_recorded_run_are_shown_as_they_stood(page: Page, shown_run: Path) -> None:
    page.get_by_role("tab", name="Sessions").click()
    expect(page.locator(".side")).to_contain_text("no record of the engine's sessions")
    state = {
        "window": 512, "is_busy": False, "num_system_tokens": 9, "num_window_tokens": 128,
        "num_recalled_tokens": 64, "num_archived_tokens": 500, "num_kv_blocks": 12, "num_turns": 7,
    }  # fmt: skip
    name = "made-robot-1"
    lines = [
        {"t": t, "session_id": name, "state": {"session_id": name, "is_parked": is_parked} | state}
        for t, is_parked in ((2.0, False), (6.0, True))
    ]
    (shown_run / "sessions.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for t, tier in ((4, "in memory"), (7, "parked")):
        seek(page, t)
        section = page.locator(".sessions section", has_text=tier)
        expect(section.locator(".session-head b")).to_have_text("made-robot-1")
    page.locator(".session-head").click()
    expect(page.locator(".session-acts")).to_contain_text("500 archived")
    expect(page.get_by_role("button", name="Park")).to_have_count(0)  # of the past nothing is changed


def test_a_film_is_made_by_a_button(page: Page) -> None:
    page.get_by_role("button", name="Save as").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("operation").fill("200")
    dialog.get_by_label("reviews").fill("200")
    dialog.get_by_role("button", name="Make the film").click()
    expect(dialog.get_by_role("link", name="Download")).to_be_visible(timeout=60_000)
    with page.expect_download() as download:
        dialog.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == "made.mp4"


def test_a_lost_connection_is_shown(browser: Browser, shown_run: Path) -> None:
    # No `open_page`: that the page complains is the point.
    page = browser.new_page()
    with running_page(PageOptions(runs_dir=shown_run.parent, port=0)) as address:
        page.goto(address)
        expect(page.locator(".badge")).to_have_text("recorded")
    expect(page.locator(".badge")).to_have_text("not connected")
    page.close()
