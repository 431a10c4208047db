"""Whole messages arrive in order, however they are cut on the way, and neither side waits for the other."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.core_link import CoreLink


@pytest.fixture
def links() -> Iterator[tuple[CoreLink, CoreLink]]:
    ours, its = map(CoreLink, socket.socketpair())
    yield ours, its
    ours.close()
    its.close()


sizes = st.one_of(st.integers(0, 40), st.integers(200_000, 600_000))


@given(st.lists(sizes, max_size=8))
def test_messages_arrive_whole_and_in_order(message_sizes: list[int]):
    sender, receiver = map(CoreLink, socket.socketpair())
    sent = [bytes([index]) * size for index, size in enumerate(message_sizes)]
    for message in sent:
        sender.send(message)  # more than a socket holds: the rest is kept
    received: list[bytes] = []
    while len(received) < len(sent):
        received += receiver.receive()
        sender.flush()
    assert received == sent
    assert receiver.receive() == []
    assert not sender.has_unsent
    assert not receiver.is_closed
    sender.close()
    receiver.close()


@given(st.binary(max_size=60), st.data())
def test_a_message_in_parts_is_one(message: bytes, data: st.DataObject):
    sender, wire = socket.socketpair()
    CoreLink(sender).send(message)
    on_the_wire = wire.recv(1 << 16)
    cut = data.draw(st.integers(1, len(on_the_wire) - 1))
    receiver = CoreLink(sender)
    wire.send(on_the_wire[:cut])
    assert receiver.receive() == []
    wire.send(on_the_wire[cut:])
    assert receiver.receive() == [message]
    receiver.close()
    wire.close()


def test_a_sender_of_a_reader_that_sleeps_does_not_wait(links: tuple[CoreLink, CoreLink]):
    sender, receiver = links
    for _ in range(64):
        sender.send(bytes(1 << 16))
    assert sender.has_unsent
    assert not select.select([], [sender], [], 0)[1]
    receiver.receive()
    assert select.select([], [sender], [], 0)[1]


def test_what_came_before_the_end_is_received(links: tuple[CoreLink, CoreLink]):
    sender, receiver = links
    sender.send(b"last words")
    sender.close()
    assert receiver.receive() == [b"last words"]
    receiver.receive()
    assert receiver.is_closed


def test_what_nobody_will_read_is_dropped(links: tuple[CoreLink, CoreLink]):
    sender, receiver = links
    receiver.close()
    sender.send(b"too late")
    assert not sender.has_unsent


def test_the_last_messages_are_waited_for(links: tuple[CoreLink, CoreLink]):
    sender, receiver = links
    for _ in range(32):
        sender.send(bytes(1 << 16))
    received: list[bytes] = []

    def read_all() -> None:
        while not receiver.is_closed:
            select.select([receiver], [], [])
            received.extend(receiver.receive())

    reader = threading.Thread(target=read_all)
    reader.start()
    sender.close(linger_s=30.0)
    reader.join()
    assert received == [bytes(1 << 16)] * 32
