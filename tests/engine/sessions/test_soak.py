"""Random lives of many sessions for a given time, with the engine's own checks after every action."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from random import Random

import psutil
import pytest

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import MatchKind, OnMatch, SessionConfig
from tests.engine.driving import run, turn_request

NUM_SESSIONS = 20
TRIGGERS = (
    OnMatch(text="review", last_n=2),
    OnMatch(text=r"lift \d+", match=MatchKind.REGEX, last_n=1),
    OnMatch(match=MatchKind.SEMANTIC, similar_n=1, min_score=0.5),
)


class Soak:
    """One engine, and what clients do to it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.random = Random(7)
        self.names = [self._open() for _ in range(NUM_SESSIONS)]
        self.num_actions = 0

    def act(self) -> None:
        """One random action on one or several sessions."""
        name, engine = self.random.choice(self.names), self.engine
        match self.random.choices(
            ("turns", "cancel", "park", "prefetch", "fork", "close", "triggers"), (8, 4, 2, 2, 1, 1, 1)
        ):
            case ["turns"]:
                for called in self.random.sample(self.names, self.random.randint(1, NUM_SESSIONS)):
                    engine.submit(self._turn(called))
                run(engine)
            case ["cancel"]:
                request = self._turn(name)
                engine.submit(request)
                for _ in range(self.random.randrange(6)):
                    engine.step()
                engine.cancel(request.request_id)
                run(engine)
            case ["park"]:
                engine.park_session(name)
            case ["prefetch"]:
                engine.prefetch_session(name)
            case ["fork"]:
                self._replace(name, engine.fork_session(name).session_id)
            case ["close"]:
                self._replace(name, self._open())
            case ["triggers"]:
                engine.set_triggers(name, tuple(self.random.sample(TRIGGERS, 2)))
        engine.check_invariants()
        self.num_actions += 1

    def _open(self) -> str:
        return self.engine.open_session(SessionConfig(system="Lead.", recall_budget=100)).session_id

    def _replace(self, old: str, new: str) -> None:
        self.names[self.names.index(old)] = new
        self.engine.close_session(old)

    def _turn(self, name: str):
        text = self.random.choice(("lift 1", "review", "put the bowl on the plate", "go on"))
        recall = (0.0, 5.0) if self.random.random() < 0.3 else None
        return turn_request(name, text, at=float(self.num_actions), max_tokens=3, recall=recall)


def soak(folder: Path, store_dir: Path, seconds: float) -> None:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        num_kv_blocks=64,
        window=160,
        host_kv_bytes=40 * 16384,
        store_dir=store_dir,
        max_num_batched_tokens=64,
    )
    engine = Engine(config)
    soaked = Soak(engine)
    process, started, before = psutil.Process(), time.monotonic(), None
    while (elapsed := time.monotonic() - started) < seconds:
        soaked.act()
        if before is None and elapsed > seconds / 3:
            before = (_num_fds(), threading.active_count(), process.memory_info().rss)
    assert before is not None
    # A fork's source is closed with it: open files are those of the sessions.
    assert abs(_num_fds() - before[0]) <= 2
    assert threading.active_count() == before[1]
    assert process.memory_info().rss - before[2] < 64 << 20
    for name in soaked.names:
        engine.park_session(name)
    assert engine.pool.num_free == 64
    engine.close()


def _num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(300)
def test_a_soak_of_a_minute(tiny_model_dir: Path, tmp_path: Path) -> None:
    soak(tiny_model_dir, tmp_path, 60)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_soak_of_ten_minutes(tiny_model_dir: Path, tmp_path: Path) -> None:
    soak(tiny_model_dir, tmp_path, 600)
