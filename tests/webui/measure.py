"""The page's numbers, measured: `python -m tests.webui.measure open|latency [--minutes N]`.

open      an hour of a hundred robots, from the address to the first picture on the screen
latency   8 robots x 2 cameras x 10 Hz through recorder, feed and browser: from the simulator's frame to the
          pixel, with --minutes N as a soak: memory of page and server, every half minute
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from dayshift.dataset_export.store import RunStore, database_url
from dayshift.dataset_export.writer_process import RecorderProcess
from dayshift.sim.types import CONTROL_HZ, Frame
from dayshift.types import RunClock
from dayshift.webui.app import PageOptions
from dayshift.webui.events import FrameRendered
from dayshift.webui.publisher import LivePublisher
from dayshift.webui.server import serve
from tests.webui.browser import chromium
from tests.webui.made_runs import MadeRun, make_spec, make_start

NUM_ROBOTS = 8
IMAGE_SIZE = 256
ATTEMPT_FRAMES = 300
LEVELS = 50  # a picture's corner says which of the last so many it is
_WATCH = """
(() => {
  const draw = CanvasRenderingContext2D.prototype.drawImage;
  window.seen = [];
  CanvasRenderingContext2D.prototype.drawImage = function (...args) {
    draw.apply(this, args);
    if (!(args[0] instanceof ImageBitmap)) return;
    const name = this.canvas.getAttribute("aria-label");
    const level = Math.round(this.getImageData(this.canvas.width - 5, 4, 1, 1).data[0] / 5);
    window.seen.push([name, level, Date.now() / 1000]);
  };
})();
"""


def serve_page(connection: Connection, runs_dir: Path) -> None:
    """Main function of the page's process."""
    serve(PageOptions(runs_dir=runs_dir, port=0), on_ready=connection.send)


class PageProcess:
    """The page in a process of its own, as in use."""

    def __init__(self, runs_dir: Path) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.process = context.Process(target=serve_page, args=(theirs, runs_dir), daemon=False)
        self.process.start()
        theirs.close()
        self.address: str = ours.recv()

    def __enter__(self) -> PageProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.join()


def measure_open(run_dir: Path) -> dict[str, Any]:
    """Seconds until board and first pictures are on the screen; the first time the server reads the run."""
    seconds = []
    with PageProcess(run_dir.parent) as page, chromium() as browser:
        for _ in range(4):
            tab = browser.new_page(viewport={"width": 1280, "height": 820})
            begin = time.perf_counter()
            tab.goto(f"{page.address}#run={run_dir.name}&t=12")
            tab.wait_for_selector("button.cell.running")
            tab.wait_for_function("() => document.querySelector('.tile-frame')?.textContent.includes('/')")
            seconds.append(round(time.perf_counter() - begin, 3))
            tab.close()
    return {"first_s": seconds[0], "again_s": seconds[1:], "load": psutil.getloadavg()[0]}


class Robots:
    """Robots that play made frames at the pace of real ones, through the real recorder and feed."""

    def __init__(self, run_dir: Path) -> None:
        self._clock = RunClock()
        self._run_dir = run_dir
        self._stop = threading.Event()
        self.sent: dict[tuple[str, int], float] = {}  # (robot, level) -> Unix time

    def run(self) -> None:
        with (
            RecorderProcess(self._run_dir, now=self._clock.now) as recorder,
            LivePublisher(self._run_dir, now=self._clock.now, engine_url=None) as publish,
        ):
            threads = [
                threading.Thread(target=self._robot, args=(number, recorder, publish))
                for number in range(1, NUM_ROBOTS + 1)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def stop(self) -> None:
        self._stop.set()

    def _robot(self, number: int, recorder: RecorderProcess, publish: LivePublisher) -> None:
        robot, attempt, level = f"robot-{number}", 0, 0
        noise = np.random.default_rng(number).integers(
            60, 190, (IMAGE_SIZE // 8, IMAGE_SIZE // 8, 3), np.uint8
        )
        background = noise.repeat(8, 0).repeat(8, 1)
        due = time.monotonic()
        while not self._stop.is_set():
            attempt += 1
            with recorder.attempt(f"{robot}-live{attempt}") as recording:
                recording.on_start(make_spec(IMAGE_SIZE), make_start())
                for index in range(ATTEMPT_FRAMES):
                    if self._stop.is_set():
                        break
                    images = {}
                    if index % 2 == 0:
                        level = (level + 1) % LEVELS
                        image = background.copy()
                        image[:16, :16] = 5 * level
                        images = {"agentview": image, "wrist": image.copy()}
                        self.sent[robot, level] = time.time()
                    frame = Frame(
                        index=index, sim_state=np.zeros(79), robot_state=np.zeros(8, np.float32),
                        action=np.zeros(7, np.float32), reward=0.0, success=False, images=images,
                    )  # fmt: skip
                    recording.on_frame(frame)
                    if images:
                        publish(
                            FrameRendered(
                                t=self._clock.now(), robot=robot, attempt_id=recording.attempt_id,
                                index=index, images=images,
                            )
                        )  # fmt: skip
                    due += 1 / CONTROL_HZ
                    time.sleep(max(0.0, due - time.monotonic()))


def measure_latency(folder: Path, minutes: float) -> dict[str, Any]:
    run_dir = MadeRun(folder / "live", num_robots=NUM_ROBOTS, operation_s=4, num_recorded=0).build()
    with RunStore(database_url(run_dir), run_dir.name):  # keeps the write-ahead log open, as a run does
        robots = Robots(run_dir)
        running = threading.Thread(target=robots.run)
        running.start()
        try:
            with PageProcess(folder) as page, chromium() as browser:
                tab = browser.new_page(viewport={"width": 1920, "height": 1200})
                tab.add_init_script(_WATCH)
                tab.goto(page.address)
                tab.wait_for_selector(".badge.live")
                delays: list[float] = []
                memory = []
                end = time.monotonic() + 60 * minutes
                while time.monotonic() < end:
                    tab.evaluate("() => { window.seen = []; }")
                    tab.wait_for_timeout(min(4000, 1000 * LEVELS / 10 - 500))
                    for name, level, at in tab.evaluate("() => window.seen"):
                        delay = at - robots.sent.get((name.split(",")[0], level), at + 1)
                        if 0 <= delay < 3:
                            delays.append(1000 * delay)
                    if not memory or time.monotonic() - memory[-1][0] > 30:
                        heap = tab.evaluate(
                            "() => { window.gc?.(); return performance.memory.usedJSHeapSize; }"
                        )
                        rss = psutil.Process(page.process.pid).memory_info().rss
                        memory.append((time.monotonic(), round(rss / 2**20), round(heap / 2**20, 1)))
        finally:
            robots.stop()
            running.join()
    delays.sort()
    return {
        "pictures": len(delays),
        "p50_ms": round(statistics.median(delays)),
        "p95_ms": round(delays[int(0.95 * len(delays))]),
        "server_mib": [rss for _, rss, _ in memory],
        "page_heap_mib": [heap for _, _, heap in memory],
        "load": psutil.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["open", "latency"])
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--run", type=Path, help="open: a run that is there, instead of making one (minutes)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "open":
            made = MadeRun(
                Path(folder) / "hour", num_robots=100, operation_s=2900, attempt_s=9, num_recorded=2
            )
            found = measure_open(arguments.run or made.build())
        else:
            found = measure_latency(Path(folder), arguments.minutes)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
