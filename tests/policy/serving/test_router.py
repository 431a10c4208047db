"""Policies through a router: calls and websockets come to an engine that serves the policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as open_socket

from dayshift.engine.action_api import ActionBody, PolicyNotFoundError
from dayshift.engine.api import InvalidRequestError
from dayshift.engine.array_packing import pack, unpack
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.router import running_router
from dayshift.engine.server.run import ServerOptions, running_server
from tests.policy.serving.conftest import MakeVenv
from tests.policy.serving.test_other_clients import OPENPI, drive


@pytest.fixture(scope="module")
def planner_url(engine_config: EngineConfig) -> Iterator[str]:
    """An engine without policies."""
    with running_server(replace(engine_config, policies=()), ServerOptions(port=0, in_process=True)) as url:
        yield url


@pytest.fixture(scope="module")
def router_url(planner_url: str, server_url: str) -> Iterator[str]:
    with running_router([planner_url, server_url]) as url:
        yield url


@pytest.fixture
def routed(router_url: str) -> Iterator[DayshiftClient]:
    with DayshiftClient(router_url, timeout_s=60) as client:
        yield client


def observation() -> dict[str, object]:
    rng = np.random.default_rng(0)
    return {
        "observation/image": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
        "observation/wrist_image": rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
        "observation/state": rng.random(8).astype(np.float32),
        "prompt": "turn on the stove",
    }


def received(socket: ClientConnection) -> dict[str, Any]:
    message = socket.recv(30)
    assert isinstance(message, bytes)
    return unpack(message)


def socket_url(url: str, path: str) -> str:
    return f"ws://{urlsplit(url).netloc}{path}"


def test_every_engines_policies_are_listed(routed: DayshiftClient, client: DayshiftClient):
    assert routed.policies() == client.policies()


def test_actions_come_from_the_engine_that_has_the_policy(
    routed: DayshiftClient, client: DayshiftClient, body: ActionBody, router_url: str, planner_url: str
):
    chunks = [routed.act("arm", body) for _ in range(4)]
    assert {chunk.actions for chunk in chunks} == {client.act("arm", body).actions}
    lines = httpx.get(f"{router_url}/metrics").text.splitlines()
    refusals = [line for line in lines if "untaken_calls_total{" in line and planner_url in line]
    assert sum(float(line.split()[-1]) for line in refusals) <= 1  # it is not asked again


def test_errors_of_the_engine_are_passed_on(routed: DayshiftClient, body: ActionBody):
    with pytest.raises(PolicyNotFoundError, match="'leg' is not served here"):
        routed.act("leg", body)
    with pytest.raises(InvalidRequestError, match="wanted are 8 finite numbers"):
        routed.act("arm", ActionBody(images=body.images, state=(1.0,), instruction="go"))


@pytest.mark.parametrize("path", ["/", "/v1/policies/arm/openpi"])
def test_openpis_messages_pass_both_ways(router_url: str, path: str):
    with open_socket(socket_url(router_url, path), compression=None, proxy=None) as socket:
        assert received(socket)["name"] == "arm"
        for _ in range(2):
            socket.send(pack(observation(), text_keys=False))
            assert received(socket)["actions"].shape == (10, 7)
        socket.send(pack({"prompt": "turn on the stove"}, text_keys=False))
        assert isinstance(socket.recv(30), str)  # an error is a text, and the connection goes on
        socket.send(pack(observation(), text_keys=False))
        assert received(socket)["actions"].shape == (10, 7)


def test_a_policy_that_nobody_serves_is_refused_by_an_engine(router_url: str):
    with open_socket(socket_url(router_url, "/v1/policies/leg/openpi"), proxy=None) as socket:
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(30)
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, "'leg' is not served here" in closed.value.rcvd.reason) == (
            1008,
            True,
        )


def test_a_socket_that_no_engine_has_is_not_opened(router_url: str):
    with pytest.raises(InvalidStatus, match="403"):
        open_socket(socket_url(router_url, "/v1/policies/arm/another-protocol"), proxy=None)


def test_clients_unmodified(make_venv: MakeVenv, router_url: str):
    address = urlsplit(router_url)
    report = drive(make_venv(*OPENPI), "drive_openpi.py", "127.0.0.1", str(address.port), "")
    assert report["metadata"]["name"] == "arm"
    assert report["shape"] == [10, 7]
    url = f"{socket_url(router_url, '/v1/policies/arm/vla-eval')}?n_action_steps=10"
    report = drive(make_venv("vla-eval==0.8.0"), "drive_vla_eval.py", url)
    assert report["shapes"] == [[7]] * 4
    assert report["num_different"] == 3


def test_connections_are_spread_and_the_next_one_leaves_an_engine_that_ended(
    engine_config: EngineConfig, server_url: str
):
    with ExitStack() as stack:
        ending = stack.enter_context(ExitStack())
        other_url = ending.enter_context(
            running_server(engine_config, ServerOptions(port=0, in_process=True))
        )
        url = stack.enter_context(running_router([other_url, server_url]))
        address = socket_url(url, "/v1/policies/arm/openpi")
        first, second = (stack.enter_context(open_socket(address, proxy=None)) for _ in range(2))
        assert received(first) == received(second)
        engines = httpx.get(f"{url}/v1/engines").json()["engines"]
        assert [engine["num_in_flight"] for engine in engines] == [1, 1]
        ending.close()
        with pytest.raises(ConnectionClosed) as closed:
            first.recv(30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1012  # service restart: the client may connect again
        for socket in (second, stack.enter_context(open_socket(address, proxy=None))):
            if socket is not second:
                received(socket)
            socket.send(pack(observation(), text_keys=False))
            assert received(socket)["actions"].shape == (10, 7)
