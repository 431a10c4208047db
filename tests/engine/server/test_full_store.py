"""A server whose store's disk is full: a 507 for what cannot be taken, and everything else goes on."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from dayshift.engine.api import (
    EngineError,
    Message,
    OnMatch,
    SamplingParams,
    SessionConfig,
    SessionLockedError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
    TurnRequest,
)
from dayshift.engine.client import DayshiftClient
from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from dayshift.engine.wire import error_code, error_from_code
from tests.engine.store.samples import file_size_limit


def turn(text: str) -> TurnRequest:
    return TurnRequest(
        request_id=uuid.uuid4().hex,
        session_id="robot",
        at=0.0,
        messages=(Message("user", text),),
        sampling=SamplingParams(max_tokens=4, ignore_eos=True),
    )


def test_what_a_full_disk_cannot_take_is_a_507_and_changes_nothing(
    engine_config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(engine_config, store_dir=tmp_path, host_kv_bytes=0)
    options = ServerOptions(port=0, model_name="tiny", in_process=True)
    with running_server(config, options) as url, DayshiftClient(url, timeout_s=60) as client:
        client.open_session(SessionConfig(session_id="robot", system="You lead."))
        client.turn(turn("Step 1."))
        before = client.session("robot")
        rule = OnMatch(text="x", last_n=1)
        refused: tuple[Callable[[], object], ...] = (
            lambda: client.turn(turn("Step 2.")),
            lambda: list(client.stream_turn(turn("Step 2."))),
            lambda: client.open_session(SessionConfig(session_id="another")),
            lambda: client.fork_session("robot"),
            lambda: client.set_triggers("robot", (rule,)),
        )
        with file_size_limit(100):
            for call in refused:
                caplog.clear()
                with pytest.raises(StoreFullError, match=r"^[\w.]+: no space is left"):
                    call()
                assert str(tmp_path) in caplog.text, "who runs the server is told what clients are not"
            body = {"text": "Step 2.", "max_tokens": 4}
            reply = httpx.post(f"{url}/v1/sessions/robot/turns", json=body, timeout=60)
            assert (reply.status_code, reply.json()["error"]["code"]) == (507, "store_full")
            assert str(tmp_path) not in reply.text
            assert client.session("robot") == before
            client.park_session("robot")  # its KV is lost, and computed again
        ledger = client.turn(turn("Step 2.")).ledger
        assert (ledger.recomputed > 0, ledger.restored) == (True, 0)
        assert client.set_triggers("robot", (rule,)).triggers == (rule,)


def test_errors_of_the_store_cross_a_border_as_themselves() -> None:
    for kind in (SessionLockedError, StoreCorruptError, StoreFullError, StoreError, EngineError):
        assert type(error_from_code(error_code(kind("x")), "x")) is kind
