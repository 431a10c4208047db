"""The core's loop with robots alone: what it reads, and what it does before it reads on."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from dayshift.engine.action_api import ActionRequest, Actions, PolicyInfo
from dayshift.engine.action_scheduler import ActionScheduler
from dayshift.engine.config import EngineConfig
from dayshift.engine.core_link import CoreLink
from dayshift.engine.core_messages import Answer, FromCore, Shutdown, SubmitActions
from dayshift.engine.core_process import _Channel, serve_requests
from dayshift.engine.engine import Engine
from dayshift.engine.servable import Progress

NUM_ROBOTS = 6


@dataclass
class LoggedPolicy:
    """Two robots are a group; what is done with them is written down."""

    log: list[str] = field(default_factory=list)
    max_batch_size: int = NUM_ROBOTS
    group_size: int | None = 2
    info: PolicyInfo = field(
        default_factory=lambda: PolicyInfo(
            name="arm", kind="arm", cameras=(), state_dim=1, action_dim=1, chunk_size=1, n_action_steps=1
        )
    )

    def slice_s(self, batch_size: int) -> tuple[float, ...]:
        return (60.0,) * (-(-batch_size // 2) + 1)  # the device works for longer than the test runs

    def prepare(self, request: ActionRequest) -> float:
        self.log.append("read")
        return request.state[0]

    def infer(self, batch: Sequence[float]) -> Generator[Progress, Sequence[float] | None, list[Actions]]:
        members, waiting = list[float](), list(batch)
        while waiting:
            group, waiting = waiting[:2], waiting[2:]
            members += group
            self.log.append(f"launch {len(group)}")
            may_grow = not waiting and len(members) < self.max_batch_size
            waiting += (yield Progress.OPEN if may_grow else Progress.SLICE_DONE) or ()
        return [((state,),) for state in members]


def test_the_first_group_is_launched_before_the_others_are_read(tiny_model_dir: Path):
    """Though all messages are there; then the others are read while the device works."""
    engine = Engine(
        EngineConfig(model=str(tiny_model_dir), kv_cache_bytes=32 << 20, window=512, restore="read")
    )
    policy = LoggedPolicy()
    ours, its = socket.socketpair()
    front = CoreLink(ours)
    for robot in range(NUM_ROBOTS):
        request = ActionRequest(policy="arm", images={}, state=(float(robot),), instruction="go")
        front.send(msgspec.msgpack.encode(SubmitActions(robot, request)))
    core = threading.Thread(
        target=serve_requests,
        args=(engine, ActionScheduler({"arm": policy}), _Channel(CoreLink(its), None)),
    )
    core.start()
    decoder = msgspec.msgpack.Decoder[FromCore](FromCore)
    answers: list[FromCore] = []
    while len(answers) < NUM_ROBOTS:
        assert select.select([front], [], [], 60.0)[0]
        answers += map(decoder.decode, front.receive())
    front.send(msgspec.msgpack.encode(Shutdown()))
    core.join()
    front.close()
    its.close()
    engine.close()
    assert sorted(answer.call_id for answer in answers if isinstance(answer, Answer)) == list(
        range(NUM_ROBOTS)
    )
    assert policy.log == ["read"] * 2 + ["launch 2"] + ["read"] * 4 + ["launch 2"] * 2
