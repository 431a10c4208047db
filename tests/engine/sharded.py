"""Engines over two processes in tests, and what they must not leave behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from dayshift.engine import Engine
from dayshift.engine.config import EngineConfig
from tests.engine.driving import take_turn, turn_request

TEXTS = ["put the bowl on the plate", "Result: failed, attempt 1 of 2.", "turn on the stove", "and now?"]


def config_of(folder: Path, **fields: object) -> EngineConfig:
    return replace(
        EngineConfig(model=str(folder), kv_cache_bytes=8 << 20, window=600, restore="read"), **fields
    )


def workers_of(pid: int) -> list[int]:
    """The workers that a process has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"dayshift.engine.tensor_parallel.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    """An engine over two processes, which leaves neither a process nor a group behind."""
    engine = Engine(replace(config, tensor_parallel=2))
    workers = workers_of(os.getpid())
    assert len(workers) == 1
    try:
        yield engine
    finally:
        engine.close()
        assert not any(map(is_alive, workers))
        assert not dist.is_initialized()


def replies(engine: Engine, texts: list[str], session_id: str = "robot") -> list[tuple[int, ...]]:
    return [take_turn(engine, turn_request(session_id, text, 0.0)).token_ids for text in texts]
