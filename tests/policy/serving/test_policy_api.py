"""`/v1/policies`: chunks over HTTP, beside the LLM; what is refused and how."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import torch
import websockets.sync.client
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dayshift.engine.action_api import ActionBody, DeadlineExceededError, PolicyNotFoundError, RunningChunk
from dayshift.engine.api import GenerateResult, InvalidRequestError, SamplingParams
from dayshift.engine.array_packing import pack, unpack
from dayshift.engine.client import DayshiftClient
from dayshift.policy.smolvla.policy import ActionRequest, SmolVLAPolicy


def test_the_served_policies(client: DayshiftClient) -> None:
    (info,) = client.policies()
    assert (info.name, info.kind) == ("arm", "smolvla")
    assert info.cameras == ("observation.images.image", "observation.images.image2")
    assert (info.state_dim, info.action_dim, info.chunk_size, info.n_action_steps) == (8, 7, 10, 1)


def test_a_chunk_is_what_the_policy_computes(
    client: DayshiftClient, body: ActionBody, checkpoint: Path
) -> None:
    policy = SmolVLAPolicy.load(checkpoint)
    settings = policy.config.policy
    assert body.seed is not None
    noise = torch.randn(
        (1, settings.chunk_size, settings.max_action_dim), generator=torch.Generator().manual_seed(body.seed)
    )
    images = {
        name: np.frombuffer(image.data, np.uint8).reshape(image.height, image.width, 3).copy()
        for name, image in body.images.items()
    }
    state = np.array(body.state, dtype=np.float32)
    request = ActionRequest(images=images, state=state, instruction=body.instruction)
    (expected,) = policy.act([request], noise)
    chunk = client.act("arm", body)
    np.testing.assert_allclose(chunk.actions, expected.actions, atol=1e-5)
    assert chunk.batch_size == 1
    assert chunk.infer_ms > 0


def test_json_and_msgpack_say_the_same(client: DayshiftClient, server_url: str, body: ActionBody) -> None:
    plain = {
        "images": {
            name: {
                "height": image.height,
                "width": image.width,
                "data": base64.b64encode(image.data).decode(),
            }
            for name, image in body.images.items()
        },
        "state": body.state,
        "instruction": body.instruction,
        "seed": body.seed,
    }
    reply = httpx.post(f"{server_url}/v1/policies/arm/actions", json=plain, timeout=60)
    assert reply.headers["content-type"] == "application/json"
    np.testing.assert_allclose(reply.json()["actions"], client.act("arm", body).actions, atol=1e-6)


def test_many_robots_share_batches_and_one_bad_request_fails_alone(
    client: DayshiftClient, body: ActionBody
) -> None:
    alone = client.act("arm", body).actions
    bodies = [msgspec.structs.replace(body, instruction="turn on the stove" + " now" * i) for i in range(7)]
    bodies.append(msgspec.structs.replace(body, state=(1.0, 2.0)))
    gate = threading.Barrier(len(bodies))

    def ask(one: ActionBody):
        gate.wait()
        try:
            return client.act("arm", one)
        except InvalidRequestError as error:
            return error

    with ThreadPoolExecutor(len(bodies)) as robots:
        answers = list(robots.map(ask, bodies))
    assert isinstance(answers[-1], InvalidRequestError)
    chunks = [answer for answer in answers if not isinstance(answer, InvalidRequestError)]
    assert len(chunks) == 7
    assert max(chunk.batch_size for chunk in chunks) > 1
    np.testing.assert_allclose(chunks[0].actions, alone, atol=1e-5)  # whatever batch it was in


def test_chunks_and_tokens_are_computed_side_by_side(client: DayshiftClient, body: ActionBody) -> None:
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    with ThreadPoolExecutor(1) as executor:
        generation = executor.submit(client.generate, [5] * 400, sampling)
        num_chunks = 0
        while not generation.done():
            client.act("arm", body)
            num_chunks += 1
        result: GenerateResult = generation.result()
    assert len(result.token_ids) == 200
    assert num_chunks > 1
    assert result.token_ids == client.generate([5] * 400, sampling).token_ids


def test_a_request_that_is_late_is_not_computed(client: DayshiftClient, body: ActionBody) -> None:
    with pytest.raises(DeadlineExceededError, match="deadline passed"):
        client.act("arm", msgspec.structs.replace(body, deadline_ms=1e-6))
    assert client.act("arm", msgspec.structs.replace(body, deadline_ms=60_000)).actions


def test_guidance_keeps_a_new_chunk_at_the_running_one(client: DayshiftClient, body: ActionBody) -> None:
    running = np.array(client.act("arm", body).actions)
    other = msgspec.structs.replace(body, seed=8)
    free = np.array(client.act("arm", other).actions)
    chunk = RunningChunk(actions=tuple(map(tuple, running.tolist())), num_frozen=3, num_guided=8)
    guided = np.array(client.act("arm", msgspec.structs.replace(other, running=chunk)).actions)
    assert np.abs(guided - running)[:3].max() < 0.2 * np.abs(free - running)[:3].max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": (float("nan"),) * 8}, "8 finite numbers"),
        ({"images": {}}, "at least one camera"),
        ({"running": RunningChunk(actions=((1.0,),), num_frozen=0, num_guided=1)}, "rows of 7"),
        ({"running": RunningChunk(actions=(), num_frozen=0, num_guided=1)}, "rows of 7"),
        ({"running": RunningChunk(actions=((1.0,) * 7, (1.0,)), num_frozen=0, num_guided=1)}, "rows of 7"),
    ],
)
def test_what_a_policy_refuses(client: DayshiftClient, body: ActionBody, change: dict, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        client.act("arm", msgspec.structs.replace(body, **change))


def test_unknown_policies_and_cameras(client: DayshiftClient, body: ActionBody) -> None:
    with pytest.raises(PolicyNotFoundError, match="served: arm"):
        client.act("leg", body)
    unknown = msgspec.structs.replace(body, images={"image3": body.images["image"]})
    with pytest.raises(InvalidRequestError, match="there is no camera 'image3'"):
        client.act("arm", unknown)
    wider = msgspec.structs.replace(body.images["image"], width=65)
    with pytest.raises(InvalidRequestError, match="are not 64 x 65 RGB"):
        client.act("arm", msgspec.structs.replace(body, images={"image": wider}))


@pytest.mark.parametrize(
    ("content_type", "content", "message"),
    [
        ("application/json", b"{", "no action request"),
        ("application/json", json.dumps({"images": {}, "state": [1], "instruction": "a", "x": 1}), "`x`"),
        ("application/json", json.dumps({"images": {}, "state": ["1"], "instruction": "a"}), "state"),
        ("application/msgpack", b"\x80\x04cos\nsystem\n", "no action request"),  # the head of a pickle
        ("application/x-python-pickle", b"", "not supported; use application/json or application/msgpack"),
    ],
)
def test_bodies_that_are_refused(server_url: str, content_type: str, content: bytes, message: str) -> None:
    url = f"{server_url}/v1/policies/arm/actions"
    reply = httpx.post(url, content=content, headers={"content-type": content_type})
    assert reply.status_code == 400
    assert message in reply.json()["error"]["message"]


def test_websockets_refuse_pickles_other_sites_and_unknown_policies(server_url: str) -> None:
    url = server_url.replace("http", "ws", 1)
    connect = websockets.sync.client.connect
    with connect(f"{url}/v1/policies/arm/openpi") as socket:
        socket.recv()
        socket.send(b"\x80\x04\x95\x05")
        assert "msgpack" in str(socket.recv())
        socket.send(pack({"prompt": "go"}, text_keys=False))
        assert socket.recv() == "the observation has no state"
        array = {b"__ndarray__": True, b"data": b"", b"dtype": "O", b"shape": [0]}
        socket.send(msgspec.msgpack.encode({"prompt": "go", "state": array}))
        assert "allowed are numbers" in str(socket.recv())
    with pytest.raises(InvalidStatus):
        connect(f"{url}/v1/policies/arm/openpi", additional_headers={"Origin": "https://example.com"})
    with (
        connect(f"{url}/v1/policies/leg/openpi") as socket,
        pytest.raises(ConnectionClosed, match="served: arm"),
    ):
        socket.recv()


@pytest.mark.parametrize("text_keys", [False, True])
@pytest.mark.parametrize("make", [np.zeros, np.ones, lambda shape: np.random.default_rng(0).random(shape)])
def test_arrays_survive_packing(text_keys: bool, make: Callable[[tuple[int, ...]], np.ndarray]) -> None:
    for shape in [(), (0,), (3,), (2, 0, 4), (2, 3, 4)]:
        for dtype in ("float32", "float64", "uint8", "int64", "bool"):
            array = make(shape).astype(dtype)
            back = unpack(pack({"x": [array]}, text_keys=text_keys))["x"][0]
            assert back.dtype == array.dtype
            assert back.shape == array.shape
            np.testing.assert_array_equal(back, array)
