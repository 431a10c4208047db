"""Serving in a background thread, without an engine."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from dayshift.engine.server.serving import OnReady, running


def test_an_interrupt_while_a_server_starts_ends_it():
    is_ended = False

    async def start_for_long(on_ready: OnReady) -> None:
        nonlocal is_ended
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(600)
        finally:
            is_ended = True

    with pytest.raises(KeyboardInterrupt), running(start_for_long, "starting"):
        pytest.fail("it never answers")
    assert is_ended


def test_what_keeps_a_server_from_starting_is_raised():
    async def fail(on_ready: OnReady) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"), running(fail, "failing"):
        pytest.fail("it never answers")
