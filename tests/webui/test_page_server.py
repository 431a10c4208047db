"""The page's server over its real socket, without a browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from dayshift.dataset_export.run_folder import open_run
from dayshift.types import DayshiftError
from dayshift.webui.app import PageOptions
from dayshift.webui.server import running_page
from tests.webui.made_runs import MadeRun
from tests.webui.socket_client import SocketClient
from tests.webui.test_pictures import shown_index

BOTH = ["agentview", "wrist"]


@pytest.fixture(scope="module")
def address(made_run: Path) -> Iterator[str]:
    with running_page(PageOptions(runs_dir=made_run.parent, port=0)) as address:
        yield address


@pytest.fixture
def page(address: str) -> Iterator[SocketClient]:
    with SocketClient(address) as page:
        page.opened = page.ask("open", run="made")  # type: ignore[attr-defined]
        yield page


def test_a_wish_brings_boards_and_pictures_once(page: SocketClient) -> None:
    tiles = [["robot-1", BOTH], ["robot-2", ["agentview"]]]
    first = page.wish(3.0, tiles=tiles, boards={"robot-1": -1})
    assert list(first.changes[0]["boards"]) == ["robot-1"]
    assert [(picture.robot, picture.camera) for picture in first.pictures] == [(0, 0), (0, 1), (1, 0)]
    for picture in first.pictures[:1]:
        moment = first.shown["tiles"]["robot-1"]
        assert picture.t == moment["t"] <= 3.0
        assert shown_index(picture.jpeg) == moment["index"] - moment["index"] % 5
    assert first.changes[0]["series"] == ["batch_size", "cpu_percent"]
    revision = first.changes[0]["boards"]["robot-1"]["revision"]
    again = page.wish(3.0, tiles=tiles, boards={"robot-1": revision})
    assert again.pictures == []  # they are on the screen already
    assert again.changes == []


def test_of_several_wishes_the_newest_is_fulfilled(page: SocketClient) -> None:
    for number in range(200):
        page.send(type="wish", seek=1000 + number, t=number / 40, tiles=[["robot-1", BOTH]])
    seeks = []
    while not seeks or seeks[-1] != 1199:
        message = page.receive()
        if isinstance(message, dict) and message["type"] == "shown":
            seeks.append(message["seek"])
    assert seeks == sorted(seeks)
    assert len(seeks) < 200


def test_every_question_about_a_run_is_answered(page: SocketClient) -> None:
    window = {"from_s": 0, "to_s": 30, "width": 500}
    assert page.opened["robots"][0]["memory"] == "recall_kv"  # type: ignore[attr-defined]
    bars = page.ask("bars", robots=["robot-1"], **window)["robot-1"]
    assert bars["attempts"][0][2] == 0
    assert bars["reviews"]
    lanes = page.ask("lanes", **window)
    assert lanes["num_lanes"] in (1, 2)
    assert {row[7] for row in lanes["rows"]} == {"robot-1", "robot-2"}
    assert {row[7] for row in page.ask("lanes", robot="robot-2", **window)["rows"]} == {"robot-2"}
    assert len(page.ask("series", names=["cpu_percent"], **window)["cpu_percent"][0]) > 10
    log = page.ask("log", first=0, count=1000)
    assert len(log["lines"]) == log["num_lines"] <= 500
    place = page.ask("log_place", t=5.0)["line"]
    assert log["lines"][place][0] <= 5.0 < log["lines"][place + 1][0]
    jump = page.ask("jump", kind="failure", t=0.0)
    attempt = page.ask("attempt", attempt_id=jump["attempt_id"])
    assert attempt["outcome"] == "failed"
    assert attempt["state"] == "given_up"
    assert [tried[1:] for tried in attempt["siblings"]] == [
        [1, "failed", False],
        [2, "failed", False],
        [1, "done", True],
    ]
    assert "give_up" in attempt["talk"][-1]["reply"]
    recall = page.ask("jump", kind="recall", t=0.0)
    talk = page.ask("talk", robot=recall["robot"], t=recall["t"])["exchanges"]
    (asked,) = [one for one in talk if one["idx"] == recall["exchange"]]
    assert asked["recalled"] == [1, 2, 3, 4, 5, 6]  # session turns 0 to 5 are exchanges 1 to 6
    turns = page.ask("turns", robot=recall["robot"], indices=asked["recalled"])
    assert [turn["idx"] for turn in turns] == asked["recalled"]
    assert page.ask("jump", kind="failure", t=1e9) is None
    step = page.ask("frame", robot="robot-1", t=3.0, delta=1)
    assert page.ask("frame", robot="robot-1", t=step, delta=-1) < 3.0 < step


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"type": "open", "run": "../made"}, "no such run"),
        ({"type": "open", "run": "nothing"}, "no such run"),
        ({"type": "attempt", "attempt_id": "../../run.db"}, "no such attempt"),
        ({"type": "jump", "kind": "sunset", "t": 0}, "allowed are failure, review, recall"),
        ({"type": "stop"}, "is not going on"),
        ({"type": "sessions"}, "no engine runs"),
        ({"type": "start", "yaml": "name: x"}, "cannot be started from this page"),
    ],
)
def test_a_mistake_is_answered_in_one_line(page: SocketClient, question: dict, reason: str) -> None:
    reply = page.reply(**question)
    assert reason in reply["error"]
    assert "\n" not in reply["error"]


def test_what_is_not_understood_is_refused_and_the_page_goes_on(page: SocketClient) -> None:
    for text in (
        "{",
        '{"type":"dance","id":1}',
        '{"type":"bars","id":1,"from_s":3,"to_s":1,"width":5,"robots":[]}',
    ):
        page.socket.send(text)
        message = page.receive()
        assert isinstance(message, dict)
        assert message["error"].startswith("not understood")
    assert page.ask("log_place", t=0.0)["num_lines"] > 0


def test_several_pages_look_at_different_moments(address: str) -> None:
    with SocketClient(address) as one, SocketClient(address) as other:
        for page in (one, other):
            page.ask("open", run="made")
        tiles = [["robot-1", ["agentview"]]]
        early, late = one.wish(1.0, tiles=tiles), other.wish(8.0, tiles=tiles)
        assert early.shown["tiles"]["robot-1"]["t"] <= 1.0 < late.shown["tiles"]["robot-1"]["t"]
        assert early.pictures[0].jpeg != late.pictures[0].jpeg


def test_a_page_that_goes_in_the_middle_of_an_answer_is_no_error(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        with SocketClient(address) as page:
            page.ask("open", run="made")
            page.send(
                type="wish",
                seek=1,
                t=3.0,
                tiles=[["robot-1", BOTH], ["robot-2", BOTH]],
                boards={"robot-1": -1},
            )
            for number in range(30):
                page.send(type="talk", id=100 + number, robot="robot-1", t=20.0, count=200)
            page.receive()
    with SocketClient(address) as page:  # the server goes on, and has nothing to complain of
        page.ask("open", run="made")
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_other_sites_are_kept_out(address: str) -> None:
    for origin in ("http://evil.example", None, "null"):
        with pytest.raises(InvalidStatus):
            SocketClient(address, origin=origin)
    assert httpx.get(address, headers={"host": "evil.example"}).status_code == 403  # a rebound name
    assert httpx.post(address, headers={"origin": "http://evil.example"}).status_code == 403


def test_every_answer_forbids_foreign_scripts_and_frames(address: str) -> None:
    policy = httpx.get(f"{address}health").headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy


def test_a_page_with_a_key(made_run: Path) -> None:
    with running_page(PageOptions(runs_dir=made_run.parent, port=0, api_key="s3cret")) as address:
        base = address.partition("?")[0]
        assert address.endswith("?key=s3cret")
        for wrong in (base, f"{base}?key=wrong"):
            answer = httpx.get(wrong)
            assert answer.status_code == 401
            assert "set-cookie" not in answer.headers
        with pytest.raises(InvalidStatus):
            SocketClient(base)
        answer = httpx.get(f"{base}?key=s3cret&theme=dark")
        assert (answer.status_code, answer.headers["location"]) == (303, "/?theme=dark")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert "s3cret" not in cookie
        with SocketClient(base, additional_headers={"cookie": cookie.partition(";")[0]}) as page:
            assert page.ask("runs")
        with SocketClient(base, additional_headers={"authorization": "Bearer s3cret"}) as page:
            assert page.ask("runs")


def test_other_addresses_than_loopback_need_a_key(tmp_path: Path) -> None:
    with (
        pytest.raises(DayshiftError, match=r"listening on 0\.0\.0\.0 needs a key"),
        running_page(PageOptions(runs_dir=tmp_path, host="0.0.0.0", port=0)),
    ):
        pass


def test_a_read_only_page_changes_nothing(made_run: Path) -> None:
    with (
        running_page(PageOptions(runs_dir=made_run.parent, port=0, is_read_only=True)) as address,
        SocketClient(address) as page,
    ):
        assert page.ask("runs")["is_read_only"]
        page.ask("open", run="made")
        for act in ("stop", "resume", "export", "film"):
            assert page.reply(act)["error"] == "this page is read-only"
        assert page.wish(1.0, tiles=[["robot-1", BOTH]]).pictures


def test_a_film_is_made_and_can_be_fetched(tmp_path: Path, made_run: Path) -> None:
    shutil.copytree(made_run, tmp_path / "runs" / "made")
    with (
        running_page(PageOptions(runs_dir=tmp_path / "runs", port=0)) as address,
        SocketClient(address) as page,
    ):
        page.ask("open", run="made")
        task = page.ask("film", speed=120, review_speed=120)
        while task["state"] in ("waiting", "running"):
            (task,) = page.ask("tasks")
        assert task["state"] == "done", task["detail"]
        film = httpx.get(f"{address}tasks/{task['task_id']}/file")
        assert film.status_code == 200
        assert film.content[4:8] == b"ftyp"
        assert (tmp_path / "films" / "made.mp4").read_bytes() == film.content
        assert httpx.get(f"{address}tasks/99/file").status_code == 404


@pytest.mark.slow  # loads Hugging Face's datasets
def test_a_dataset_is_exported(tmp_path: Path) -> None:
    run_dir = MadeRun(tmp_path / "runs" / "made", operation_s=20, num_recorded=99, images_every=1).build()
    with running_page(PageOptions(runs_dir=run_dir.parent, port=0)) as address, SocketClient(address) as page:
        page.ask("open", run="made")
        task = page.ask("export", only=["done"])
        while task["state"] in ("waiting", "running"):
            (task,) = page.ask("tasks")
        assert task["state"] == "done", task["detail"]
        with open_run(run_dir) as run:
            num_done = sum(one.outcome == "done" for one in run.attempts())
        assert task["detail"].startswith(f"{num_done} episodes")
        assert (tmp_path / "datasets" / "made" / "meta" / "info.json").is_file()


def test_dayshift_ui_of_one_run_leads_to_it(made_run: Path) -> None:
    command = [sys.executable, "-m", "dayshift", "ui", str(made_run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        address, _, place = process.stderr.readline().split()[-1].partition("#")
        try:
            assert place == "run=made"
            with SocketClient(address) as page:
                assert [run["run"] for run in page.ask("runs")["runs"]] == ["made"]
        finally:
            process.terminate()
