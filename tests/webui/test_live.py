from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dayshift.planner.jobs import Attempt, AttemptEnded, AttemptResult, AttemptStarted, JobStep
from dayshift.types import Outcome, StepKey
from dayshift.webui import wire
from dayshift.webui.events import FrameRendered
from dayshift.webui.live import LiveRun
from dayshift.webui.publisher import LivePublisher

ATTEMPT = Attempt(
    attempt_id="robot-1-1.1.1-w1",
    robot="robot-1",
    step=JobStep(StepKey(1, 1, 1), "turn on the stove"),
    number=1,
    is_review=False,
    instruction="turn on the stove",
)
STARTED = AttemptStarted(t=1.0, robot="robot-1", attempt=ATTEMPT)
ENDED = AttemptEnded(
    t=9.0, robot="robot-1", attempt=ATTEMPT, result=AttemptResult(outcome=Outcome.DONE, num_control_steps=3)
)


def frame(index: int, size: int = 64) -> FrameRendered:
    images = {"agentview": np.full((size, size, 3), index % 256, np.uint8)}
    return FrameRendered(
        t=1.0 + index / 20, robot="robot-1", attempt_id=ATTEMPT.attempt_id, index=index, images=images
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def test_a_page_sees_what_a_run_tells_and_that_it_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        news = 0

        def count() -> None:
            nonlocal news
            news += 1

        live = LiveRun(tmp_path, count)
        await asyncio.sleep(0.05)  # nobody is there yet
        assert not live.is_live
        with LivePublisher(tmp_path, now=lambda: 7.5, engine_url="http://127.0.0.1:1") as publisher:
            await until(lambda: live.is_live)
            assert live.hello is not None
            assert live.hello.engine_url == "http://127.0.0.1:1"
            assert live.now() == pytest.approx(7.5, abs=5)
            publisher(STARTED)
            await until(lambda: "robot-1" in live.running)
            assert live.running["robot-1"]["attempt_id"] == ATTEMPT.attempt_id
            assert live.running["robot-1"]["start_s"] == 1.0
            for index in range(3):
                publisher(frame(index))
                await until(lambda: (live.newest("robot-1") or frame(99)).index == index)  # noqa: B023
            kept = live.at("robot-1", 1.0 + 1.5 / 20)
            assert kept is not None
            assert kept.index == 1
            publisher(ENDED)
            await until(lambda: not live.running)
        await until(lambda: not live.is_live)
        assert news > 5
        assert not (tmp_path / wire.SOCKET).exists()
        await live.close()

    asyncio.run(scenario())


def test_a_page_that_comes_later_hears_what_the_robots_are_at(tmp_path: Path) -> None:
    async def scenario() -> None:
        with LivePublisher(tmp_path, now=lambda: 0.0, engine_url=None) as publisher:
            publisher(STARTED)
            live = LiveRun(tmp_path, lambda: None)
            await until(lambda: "robot-1" in live.running)
            await live.close()

    asyncio.run(scenario())


def test_a_page_that_does_not_read_slows_nobody_and_gets_the_newest_picture(tmp_path: Path) -> None:
    with LivePublisher(tmp_path, now=lambda: 0.0, engine_url=None) as publisher:
        with wire.socket_address(tmp_path) as address, socket.socket(socket.AF_UNIX) as page:
            page.connect(address)
            assert isinstance(_read(page), wire.Hello)
            waited = 0.0
            for index in range(400):  # 300 MB: no socket holds them
                event = frame(index, size=512)
                begin = time.perf_counter()
                publisher(event)
                waited += time.perf_counter() - begin
            assert waited < 2.0  # a publisher that waited for this page would wait for ever
            indices = []
            while not indices or indices[-1] != 399:
                message = _read(page)
                assert isinstance(message, wire.Pictures)
                indices.append(message.index)
        assert indices == sorted(indices)
        assert len(indices) < 50


def test_a_socket_left_by_a_killed_run_is_in_nobodys_way(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead, wire.socket_address(tmp_path) as address:
        dead.bind(address)
    assert (tmp_path / wire.SOCKET).exists()

    async def scenario() -> None:
        live = LiveRun(tmp_path, lambda: None)
        await asyncio.sleep(0.05)
        assert not live.is_live
        with LivePublisher(tmp_path, now=lambda: 0.0, engine_url=None):
            await until(lambda: live.is_live)
        await live.close()

    asyncio.run(scenario())


def test_the_socket_works_in_a_folder_deeper_than_a_socket_path_may_be(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)

    async def scenario() -> None:
        with LivePublisher(deep, now=lambda: 0.0, engine_url=None):
            live = LiveRun(deep, lambda: None)
            await until(lambda: live.is_live)
            await live.close()

    asyncio.run(scenario())


def _read(page: socket.socket) -> wire.FromRun:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = page.recv(count - len(data))
            assert piece
            data += piece
        return data

    return wire.decode(exactly(int.from_bytes(exactly(wire.LENGTH_BYTES), "big")))
