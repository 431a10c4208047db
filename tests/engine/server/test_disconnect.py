"""Whoever goes away stops costing: requests are cancelled, turns rolled back, blocks given back."""

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest

from dayshift.engine import Engine
from dayshift.engine.action_scheduler import ActionScheduler
from dayshift.engine.api import (
    GenerateRequest,
    InvalidRequestError,
    Message,
    SamplingParams,
    SessionConfig,
    TurnRequest,
)
from dayshift.engine.client import DayshiftClient, EngineTimeoutError
from dayshift.engine.config import EngineConfig
from dayshift.engine.core_messages import (
    Answer,
    Cancel,
    FromCore,
    GetStats,
    Shutdown,
    SubmitGenerate,
    ToCore,
)
from dayshift.engine.core_process import serve_requests

Gauge = Callable[[str], float]


def wait_until_idle(gauge: Gauge) -> None:
    deadline = time.monotonic() + 30
    while gauge("dayshift_engine_num_running") > 0:
        assert time.monotonic() < deadline, "the request still runs after its client has gone"
        time.sleep(0.02)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_reader_is_cancelled(http: httpx.Client, gauge: Gauge, path: str, stream: bool):
    wait_until_idle(gauge)
    free_blocks = gauge("dayshift_engine_num_free_kv_blocks")
    generated = gauge("dayshift_engine_num_generated_tokens")
    prompt = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = prompt | {"stream": stream, "max_tokens": 4000, "n": 2, "ignore_eos": True}
    with httpx.Client(base_url=http.base_url, timeout=0.5) as impatient:
        if stream:
            with impatient.stream("POST", path, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                impatient.post(path, json=body)
    wait_until_idle(gauge)
    assert gauge("dayshift_engine_num_free_kv_blocks") == free_blocks
    assert gauge("dayshift_engine_num_generated_tokens") - generated < 8000


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_without_reader_is_rolled_back(
    dayshift: DayshiftClient, server_url: str, gauge: Gauge, stream: bool
):
    session_id = dayshift.open_session(SessionConfig(window=8000, recall_budget=0)).session_id
    short = SamplingParams(max_tokens=4, ignore_eos=True)
    long = SamplingParams(max_tokens=7000, ignore_eos=True)

    def request(text: str, sampling: SamplingParams, session_id: str = session_id) -> TurnRequest:
        return TurnRequest(
            request_id=uuid.uuid4().hex,
            session_id=session_id,
            at=0,
            messages=(Message("user", text),),
            sampling=sampling,
        )

    dayshift.turn(request("kept", short))
    fork = dayshift.fork_session(session_id).session_id
    if stream:
        chunks = dayshift.stream_turn(request("given up", long))
        next(chunks)
        chunks.close()
    else:
        with (
            DayshiftClient(server_url, timeout_s=0.5) as impatient,
            pytest.raises(EngineTimeoutError),
        ):
            impatient.turn(request("given up", long))
    wait_until_idle(gauge)
    info = dayshift.session(session_id)
    assert not info.is_busy
    assert [turn.text.splitlines()[0] for turn in info.turns] == ["user: kept"]
    reply = dayshift.turn(request("next", short))
    assert reply.token_ids == dayshift.turn(request("next", short, fork)).token_ids
    dayshift.close_session(fork)
    dayshift.close_session(session_id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_whose_session_is_deleted_ends_with_an_error(
    dayshift: DayshiftClient, gauge: Gauge, stream: bool
):
    free_blocks = gauge("dayshift_engine_num_free_kv_blocks")
    session_id = dayshift.open_session(SessionConfig(window=8000, recall_budget=0)).session_id
    request = TurnRequest(
        request_id=uuid.uuid4().hex,
        session_id=session_id,
        at=0,
        messages=(Message("user", "x"),),
        sampling=SamplingParams(max_tokens=7000, ignore_eos=True),
    )
    with ThreadPoolExecutor(1) as caller:
        ended = caller.submit(lambda: [*dayshift.stream_turn(request)] if stream else dayshift.turn(request))
        while not (dayshift.session(session_id).is_busy and gauge("dayshift_engine_num_running")):
            assert not ended.done()
        dayshift.close_session(session_id)
        with pytest.raises(InvalidRequestError, match=f"session {session_id} was deleted while the call ran"):
            ended.result(timeout=30)
    wait_until_idle(gauge)
    assert gauge("dayshift_engine_num_free_kv_blocks") == free_blocks


class ScriptedChannel:
    """The core's end of the socket, with what arrives before each step written down beforehand."""

    def __init__(self, arrivals: list[list[ToCore]]) -> None:
        self._arrivals = iter(arrivals)
        self.sent: list[FromCore] = []

    def receive(self, *, wait_s: float | None) -> list[ToCore]:
        return next(self._arrivals)

    def send(self, message: FromCore) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("num_steps", [0, 1, 5])
def test_a_cancelled_request_costs_no_further_step(engine_config: EngineConfig, num_steps: int):
    engine = Engine(engine_config)
    sampling = SamplingParams(max_tokens=2000, ignore_eos=True)
    request = GenerateRequest(request_id="x", prompt_token_ids=(5,) * 40, sampling=sampling)
    arrivals: list[list[ToCore]] = [[] for _ in range(num_steps)]
    channel = ScriptedChannel(
        [[SubmitGenerate(1, request)], *arrivals, [Cancel("x")], [GetStats(2)], [Shutdown()]]
    )
    serve_requests(engine, ActionScheduler({}), channel)  # type: ignore[arg-type]
    stats = next(m.result for m in channel.sent if isinstance(m, Answer) and m.call_id == 2)
    numbers = msgspec.msgpack.decode(stats)
    assert numbers["num_running"] == numbers["num_waiting"] == 0
    assert numbers["num_free_kv_blocks"] == numbers["num_kv_blocks"]
    assert numbers["num_steps"] == num_steps + 1  # the submitted one's, and none after the cancel
