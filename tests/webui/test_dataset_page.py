"""The page of a dataset, by clicks and keys in a real browser."""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect

from dayshift.dataset_export import lerobot_v3 as v3
from dayshift.dataset_export.export import export_dataset
from dayshift.dataset_export.looking.dataset import Dataset
from dayshift.dataset_export.video import VideoReader
from dayshift.webui.app import PageOptions
from dayshift.webui.build import build_page
from dayshift.webui.server import running_page
from tests.dataset_export.recording_samples import STORY, make_run
from tests.webui.browser import chromium, needs_chromium, open_page

CAMERA, WRIST = "observation.images.image", "observation.images.image2"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset, and beside it in `runs` the run that it was made of."""
    folder = tmp_path_factory.mktemp("looking")
    export_dataset([make_run(folder / "runs" / "run-1")], folder / "ds")
    return Dataset(folder / "ds")


@pytest.fixture(scope="module")
def address(dataset: Dataset) -> Iterator[str]:
    build_page()
    runs = dataset.root.parent / "runs"
    with running_page(PageOptions(runs_dir=runs, is_read_only=True, port=0, dataset=dataset)) as address:
        assert address.endswith("/dataset")
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, address: str) -> Iterator[Page]:
    with open_page(browser, f"{address}#episode=1&frame=4") as page:
        expect_frame(page, 4)
        yield page


def expect_frame(page: Page, number: int) -> None:
    """The cursor, and both cameras, come to stand at a frame."""
    expect(page.get_by_label("Frame", exact=True)).to_contain_text(re.compile(rf"^{number} /"))
    for camera in page.locator(".camera canvas").all():
        expect(camera).to_have_attribute("data-frame", str(number))


def digest_of_pixels(page: Page, camera: str) -> str:
    """SHA-256 of what is on a camera's canvas, RGBA."""
    return page.get_by_role("img", name=camera, exact=True).evaluate(
        """async (canvas) => {
            const copy = new OffscreenCanvas(canvas.width, canvas.height);
            const pen = copy.getContext("2d", {willReadFrequently: true});
            pen.drawImage(canvas, 0, 0);
            const {data} = pen.getImageData(0, 0, canvas.width, canvas.height);
            return new Uint8Array(await crypto.subtle.digest("SHA-256", data)).toHex();
        }"""
    )


def assert_exact(page: Page, dataset: Dataset, episode: int, frame: int) -> None:
    """Every pixel is that of the picture which the dataset has at this very time."""
    for camera in (CAMERA, WRIST):
        part = dataset.video(camera, episode)
        with VideoReader(part.path, fps=part.fps) as video:
            picture = video.frame(part.first + frame)
        opaque = np.full((*picture.shape[:2], 1), 255, np.uint8)
        expected = hashlib.sha256(np.concatenate([picture, opaque], axis=2).tobytes()).hexdigest()
        assert digest_of_pixels(page, camera) == expected


@needs_chromium
def test_every_frame_of_an_episode_is_shown_exactly(page: Page, dataset: Dataset) -> None:
    assert_exact(page, dataset, 1, 4)
    page.keyboard.press("Home")
    for frame in range(STORY[1].num_frames):
        expect_frame(page, frame)
        assert_exact(page, dataset, 1, frame)
        page.get_by_label("One frame on").click()
    expect_frame(page, STORY[1].num_frames - 1)  # the last stays
    page.keyboard.press("ArrowLeft")
    expect_frame(page, STORY[1].num_frames - 2)
    page.get_by_label("Frame of the episode").fill("2")
    expect_frame(page, 2)
    assert_exact(page, dataset, 1, 2)
    expect(page.locator(".hash")).to_have_text(["hash ✓", "hash ✓"])


@needs_chromium
def test_an_episode_is_chosen_from_the_filtered_list(page: Page, dataset: Dataset) -> None:
    rows = page.locator(".episode-row")
    expect(rows).to_have_count(len(STORY))
    page.get_by_role("group", name="Which episodes").get_by_role("button", name="failed").click()
    expect(rows).to_have_count(2)
    page.get_by_role("group", name="Which episodes").get_by_role("button", name="done").click()
    expect(rows).to_have_count(3)
    page.get_by_role("group", name="Which episodes").get_by_role("button", name="review").click()
    rows.first.click()
    expect(page.locator(".episode-head")).to_contain_text(
        "episode 4 · step 1.1.1 · attempt 1 · redo in its review"
    )
    expect_frame(page, 0)
    assert_exact(page, dataset, 4, 0)
    expect(page).to_have_url(re.compile("#episode=4&frame=0$"))
    page.get_by_role("group", name="Which episodes").get_by_role("button", name="all").click()
    page.get_by_label("Find episodes").fill("2.1.1")
    expect(rows).to_have_count(1)
    page.get_by_label("Find episodes").fill("")
    page.locator(".dataset-name").click()
    page.keyboard.press("[")
    expect(page.locator(".episode-head")).to_contain_text("episode 3")


@needs_chromium
def test_curves_and_words_stand_at_the_cursor(page: Page, dataset: Dataset) -> None:
    action = dataset.episode(1).curves[1]
    chart = page.locator(".lane-group", has=page.get_by_label("action over time"))
    expect(chart.locator(".series-value b").nth(2)).to_have_text(f"{action.values[4, 2]:.3f}")
    canvas = chart.locator("canvas")
    box = canvas.bounding_box()
    assert box is not None
    # Frame 6 of 0 to 8 stands at three quarters of the axis.
    x, y = box["x"] + box["width"] * 6 / 8 + 2, box["y"] + 20
    page.mouse.move(x, y)
    expect(chart.locator(".series-value b").nth(2)).to_have_text(f"{action.values[6, 2]:.3f}")
    expect(page.locator(".cursors .hover")).to_contain_text("frame 6")
    page.mouse.down()
    page.mouse.up()
    expect_frame(page, 6)

    expect(page.locator(".in-force")).to_contain_text("Failed attempts before this one: 1.")
    expect(page.locator(".word-bar.subtask")).to_have_text(STORY[1].task)
    said = page.locator(".said .exchange")
    expect(said.first).to_contain_text("Result: failed, attempt 1 of 2.")
    expect(said.last).to_have_class(re.compile("is-future"))
    said.last.get_by_title("go to this frame").click()
    expect_frame(page, STORY[1].num_frames - 1)
    expect(said.last).not_to_have_class(re.compile("is-future"))
    expect(said.last).to_contain_text("give up")
    expect(page.locator(".chips")).to_contain_text("given up · attempts")
    expect(page.locator(".facts")).to_contain_text("push")
    page.get_by_label("messages at frame 0").click()
    expect_frame(page, 0)


@needs_chromium
def test_an_episode_is_played_to_its_end(page: Page, dataset: Dataset) -> None:
    page.get_by_label("speed").select_option("0.5")
    page.keyboard.press(" ")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    expect_frame(page, STORY[1].num_frames - 1)
    assert_exact(page, dataset, 1, STORY[1].num_frames - 1)


@needs_chromium
def test_one_click_leads_to_the_moment_in_the_page_of_its_run(page: Page, dataset: Dataset) -> None:
    recorded_at = dataset.episode(1).recorded_at
    assert recorded_at is not None
    page.get_by_role("link", name="Open in the page of the run").click()
    panel = page.locator(".step-panel")
    expect(panel).to_contain_text("robot-0 · step 1.1.1")
    expect(panel.locator(".chip[aria-pressed=true]")).to_contain_text("attempt 2 failed")
    expect(page).to_have_url(re.compile(r"/#run=run-1&.*attempt=robot-0-1\.1\.1-w2"))
    expect(page.locator(".clock")).to_contain_text(f"0:00:{recorded_at[4]:.1f}")
    expect(panel.locator(".frames output")).to_have_text(f"5 / {STORY[1].num_frames}")
    page.go_back()
    expect(page.locator(".episode-head")).to_contain_text("episode 1")


@needs_chromium
def test_a_run_that_is_gone_and_a_picture_that_is_another_are_told(
    browser: Browser, dataset: Dataset, tmp_path: Path
) -> None:
    copy = shutil.copytree(dataset.root, tmp_path / "ds")
    one, other = (copy / f"videos/{key}/chunk-000/file-000.mp4" for key in (CAMERA, WRIST))
    shutil.copy(one, other)
    options = PageOptions(runs_dir=tmp_path / "none", is_read_only=True, port=0, dataset=Dataset(copy))
    with running_page(options) as address, open_page(browser, f"{address}#episode=2", width=400) as page:
        expect(page.locator(".chips")).to_contain_text("its run is not here: run-1")
        expect(page.get_by_role("link", name="Open in the page")).to_have_count(0)
        expect(page.locator(".hash").first).to_have_text("hash ✓")
        expect(page.get_by_role("alert")).to_have_text("first or last picture is not the one recorded")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width == 400  # nothing sticks out on a telephone


def test_the_server_answers_in_one_line_and_lets_nobody_else_in(address: str, dataset: Dataset) -> None:
    overview = httpx.get(f"{address}/overview")
    assert [line["outcome"] for line in overview.json()["episodes"]] == [one.outcome for one in STORY]
    assert overview.headers["content-security-policy"].startswith("default-src 'self'")
    episode = httpx.get(f"{address}/episodes/4").json()
    assert (episode["run"], episode["as_recorded"]) == ("run-1", {CAMERA: True, WRIST: True})
    assert episode["curves"][1]["values"] == dataset.episode(4).curves[1].values.T.tolist()
    for path, reason in (
        ("episodes/5", "no episode 5, allowed: 0 to 4"),
        ("episodes/0/pictures/front/0.png", "no camera front"),
        (f"episodes/0/pictures/{CAMERA}/15.png", "no frame 15, allowed: 0 to 14"),
    ):
        refused = httpx.get(f"{address}/{path}")
        assert refused.status_code == 404
        assert reason in refused.json()["detail"]
    assert httpx.get(f"{address}/overview", headers={"host": "evil.example"}).status_code == 403
    assert v3.INFO not in httpx.get(f"{address}/../{v3.INFO}").text


def test_a_key_is_asked_for_where_one_is_set(dataset: Dataset) -> None:
    options = PageOptions(runs_dir=dataset.root, is_read_only=True, port=0, dataset=dataset, api_key="a-key")
    with running_page(options) as address:
        page, _, query = address.partition("?")
        assert query == "key=a-key"
        assert httpx.get(f"{page}/overview").status_code == 401
        with httpx.Client() as browser:
            assert browser.get(page, params={"key": "a-key"}).headers["location"] == "/dataset"
            assert browser.get(f"{page}/overview").json()["name"] == "ds"


def test_the_command_prints_one_address_and_ends_by_ctrl_c(dataset: Dataset) -> None:
    arguments = ["show", str(dataset.root), "--episode", "3", "--port", "0"]
    with subprocess.Popen(
        [sys.executable, "-m", "dayshift", *arguments], stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stderr is not None
        said = re.fullmatch(
            r"the dataset is at (http://127\.0\.0\.1:\d+/dataset)#episode=3\n", command.stderr.readline()
        )
        assert said
        assert len(httpx.get(f"{said[1]}/overview").json()["episodes"]) == len(STORY)
        command.send_signal(signal.SIGINT)
        assert command.stderr.read() == ""
