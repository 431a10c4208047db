"""A robot is never stalled by its policy and never follows an old one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from dayshift.engine.api import EngineError, InvalidRequestError
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.wire import EngineTimeoutError, EngineUnreachableError
from dayshift.experiments.planners import default_model_folder
from dayshift.policy.remote.chunk_queue import Blending, Chunk
from dayshift.policy.remote.connections import ChunkRequest, connect
from dayshift.policy.remote.policy import Pace, PolicyOutageError, RemoteOptions, RemotePolicy
from dayshift.policy.serving import smolvla_source
from dayshift.policy.smolvla.parity_cases import ParityCase, write_checkpoint
from dayshift.sim.types import CAMERAS, Action, Observation, ReportingPolicy, RolloutSpec, VisionPolicy
from dayshift.types import DayshiftError

SPEC = RolloutSpec(task="turn on the stove", init_state_id=0, seed=0, max_steps=50, instruction="go")
Answer = Chunk | EngineError | Callable[[], Chunk]


@dataclass
class ScriptedConnection:
    """A server whose answers are written down beforehand; the last one is repeated."""

    answers: list[Answer]
    n_action_steps: int | None = 3
    chunk_size: int | None = None
    has_guidance: bool = True
    requests: list[ChunkRequest] = field(default_factory=list)

    def act(self, observation: Observation, request: ChunkRequest) -> Chunk:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, EngineError):
            raise answer
        return answer() if callable(answer) else answer

    def close(self) -> None: ...


@pytest.fixture
def make() -> Iterator[Callable[..., RemotePolicy]]:
    policies: list[RemotePolicy] = []

    def make(*answers: Answer, connection: ScriptedConnection | None = None, **options) -> RemotePolicy:
        policy = RemotePolicy(connection or ScriptedConnection(list(answers)), RemoteOptions(**options))
        policies.append(policy)
        policy.reset(SPEC)
        return policy

    yield make
    for policy in policies:
        policy.close()


def chunk(value: float, length: int = 6) -> Chunk:
    return np.full((length, 7), value, dtype=np.float32)


def one_step(policy: RemotePolicy) -> Action:
    """As the rollout does it: images only when the policy asks for them."""
    rng = np.random.default_rng(0)
    images = {}
    if policy.needs_images():
        images = {camera: rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for camera in CAMERAS}
    state = np.zeros(8, dtype=np.float32)
    return policy.act(Observation(state=state, instruction="turn on the stove", images=images))


def many_steps(policy: RemotePolicy, num_steps: int) -> list[Action]:
    return [one_step(policy) for _ in range(num_steps)]


def test_it_is_a_policy_that_looks_and_reports(make: Callable[..., RemotePolicy]) -> None:
    policy = make(chunk(0.5))
    assert isinstance(policy, VisionPolicy)
    assert isinstance(policy, ReportingPolicy)


def test_waiting_uses_n_action_steps_of_each_chunk(make: Callable[..., RemotePolicy]) -> None:
    connection = ScriptedConnection([chunk(0.1), chunk(0.2), chunk(0.3)])
    policy = make(connection=connection)
    values = [round(float(one_step(policy)[0]), 1) for _ in range(7)]
    assert values == [0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.3]
    assert policy.report()["num_chunks"] == 3
    seeds = [request.seed for request in connection.requests]
    policy.reset(SPEC)
    for _ in range(7):
        one_step(policy)
    assert [request.seed for request in connection.requests[3:]] == seeds  # the same noise again


def test_actions_are_clipped(make: Callable[..., RemotePolicy]) -> None:
    assert one_step(make(chunk(3.0))).tolist() == [1.0] * 7


def test_waiting_outlasts_a_short_outage(make: Callable[..., RemotePolicy]) -> None:
    policy = make(EngineUnreachableError("gone"), EngineTimeoutError("late"), chunk(0.5))
    assert one_step(policy)[0] == 0.5
    report = policy.report()
    assert (report["num_failed_requests"], report["num_held_steps"]) == (2, 0)


def test_a_long_outage_ends_the_attempt(make: Callable[..., RemotePolicy]) -> None:
    policy = make(EngineUnreachableError("gone"), max_outage_s=0.3)
    with pytest.raises(PolicyOutageError, match="no action chunk"):
        one_step(policy)


@pytest.mark.parametrize("pace", Pace)
def test_a_malformed_request_is_not_repeated(make: Callable[..., RemotePolicy], pace: Pace) -> None:
    policy = make(InvalidRequestError("no such camera"), pace=pace)
    with pytest.raises(InvalidRequestError, match="no such camera"):
        many_steps(policy, 20)


def test_in_real_time_a_silent_server_stalls_nobody(make: Callable[..., RemotePolicy]) -> None:
    is_answered = threading.Event()

    def answer_late() -> Chunk:
        is_answered.wait(30)
        return chunk(0.9)

    first = chunk(0.4)
    policy = make(first, answer_late, pace=Pace.REAL_TIME, n_action_steps=3, n_late_steps=2)
    while one_step(policy)[0] == 0.0:  # the first chunk is on its way
        pass
    actions = [one_step(policy) for _ in range(12)]
    values = [round(float(action[0]), 1) for action in actions]
    num_used = values.index(0.0)
    assert values[:num_used] == [0.4] * num_used
    assert num_used <= 4  # one was executed before
    assert values[num_used:] == [0.0] * (12 - num_used)  # holds still, never an old action
    assert {float(action[6]) for action in actions[num_used:]} == {np.float32(0.4)}  # the gripper as it was
    is_answered.set()
    time.sleep(0.1)
    one_step(policy)
    report = policy.report()
    assert report["num_stale_chunks"] == 1  # came after its last step
    assert report["num_held_steps"] >= 8


def test_an_answer_of_the_last_rollout_is_not_used(make: Callable[..., RemotePolicy]) -> None:
    is_answered = threading.Event()

    def answer_late() -> Chunk:
        is_answered.wait(30)
        return chunk(0.9)

    policy = make(answer_late, chunk(0.1), pace=Pace.REAL_TIME)
    one_step(policy)
    policy.reset(SPEC)
    is_answered.set()
    values = {round(float(one_step(policy)[0]), 1) for _ in range(6)}
    assert values <= {0.0, 0.1}
    assert 0.1 in values


def test_real_time_chunking_sends_what_is_left(make: Callable[..., RemotePolicy]) -> None:
    connection = ScriptedConnection([chunk(0.1, length=8)], n_action_steps=4)
    policy = make(connection=connection, pace=Pace.REAL_TIME, n_ahead_steps=2, blending=Blending.RTC)
    for _ in range(12):
        one_step(policy)
    first, second = connection.requests[:2]
    assert first.left is None
    assert second.left is not None
    assert 4 <= len(second.left) <= 6  # asked for with the observation of step 2, or a little later
    assert second.deadline_s == pytest.approx(8 / 20)


def test_options_that_cannot_work(make: Callable[..., RemotePolicy]) -> None:
    with pytest.raises(DayshiftError, match="n_action_steps must be given"):
        make(connection=ScriptedConnection([chunk(0)], n_action_steps=None))
    with pytest.raises(DayshiftError, match="n_action_steps is 25; the policy's chunks allow 1 to 16"):
        make(connection=ScriptedConnection([chunk(0, length=16)], chunk_size=16), n_action_steps=25)
    with pytest.raises(DayshiftError, match="needs a server of ours"):
        make(connection=ScriptedConnection([chunk(0)], has_guidance=False), blending=Blending.RTC)
    for url in ("ftp://x", "127.0.0.1:8000", "http://"):
        with pytest.raises(DayshiftError, match="allowed: http"):
            connect(url, timeout_s=1)
    with pytest.raises(EngineUnreachableError):
        connect("ws://127.0.0.1:9", timeout_s=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("policy")
    write_checkpoint(folder, ParityCase(name="served"))
    source = smolvla_source("arm", folder, device="cpu")
    return EngineConfig(
        model=str(default_model_folder()), device="cpu", kv_cache_bytes=32 << 20, policies=(source,)
    )


def test_a_robot_survives_the_restart_of_its_server(config: EngineConfig, tmp_path: Path) -> None:
    options = RemoteOptions(pace=Pace.REAL_TIME, n_action_steps=2, n_late_steps=1)
    with running_server(config, ServerOptions(port=0, in_process=True)) as url:
        port = int(url.rsplit(":", 1)[1])
        policy = RemotePolicy(connect(url, timeout_s=5), options)
        policy.reset(SPEC)
        while policy.report()["num_chunks"] < 2:
            one_step(policy)
    held_before, chunks_before = policy.report()["num_held_steps"], policy.report()["num_chunks"]
    for _ in range(10):  # nobody is there
        one_step(policy)
    assert policy.report()["num_held_steps"] >= held_before + 5
    with running_server(config, ServerOptions(port=port, in_process=True)):
        give_up_at = time.monotonic() + 60
        while policy.report()["num_chunks"] < chunks_before + 2:
            one_step(policy)
            assert time.monotonic() < give_up_at
    policy.close()


def test_openpis_protocol_from_the_robots_side(config: EngineConfig) -> None:
    with running_server(config, ServerOptions(port=0, in_process=True)) as url:
        ours = RemotePolicy(connect(url, timeout_s=30), RemoteOptions(n_action_steps=4))
        theirs = RemotePolicy(
            connect(url.replace("http", "ws", 1), timeout_s=30), RemoteOptions(n_action_steps=4)
        )
        for policy in (ours, theirs):
            policy.reset(SPEC)
            assert np.isfinite([one_step(policy) for _ in range(8)]).all()
            assert policy.report()["num_chunks"] == 2
            policy.close()
