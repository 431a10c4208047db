"""Messages come out of shared memory as they were put in, in order, and never over one that was not taken."""

from __future__ import annotations

import multiprocessing
import socket
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.core_link import CoreLink
from dayshift.engine.shared_ring import RingReader, RingWriter, accept_ring, offer_ring

CAPACITY = 1000
LARGE = 100_000  # bytes of a message that a link sends through its ring


def ring_of(capacity: int) -> tuple[RingWriter, RingReader]:
    ours, its = socket.socketpair()
    with ours, its:
        return offer_ring(ours, capacity), accept_ring(its)


@pytest.fixture
def links() -> Iterator[tuple[CoreLink, CoreLink]]:
    """The sender has a ring for two large messages."""
    ours, its = socket.socketpair()
    sender = CoreLink(ours, outgoing=offer_ring(ours, 2 * LARGE))
    receiver = CoreLink(its, incoming=accept_ring(its))
    yield sender, receiver
    sender.close()
    receiver.close()


@given(st.lists(st.one_of(st.integers(0, CAPACITY), st.just("take")), max_size=60))
def test_what_is_taken_is_what_was_put(steps: list[int | str]):
    writer, reader = ring_of(CAPACITY)
    waiting: deque[tuple[int, bytes]] = deque()
    for number, step in enumerate(steps):
        if isinstance(step, int):
            message = bytes([number]) * step
            start = writer.put(message)
            assert start is not None or waiting  # what is empty has room
            if start is not None:
                waiting.append((start, message))
        elif waiting:
            start, message = waiting.popleft()
            assert reader.take(start, len(message), bytes) == message
    for start, message in waiting:
        assert reader.take(start, len(message), bytes) == message
    writer.close()
    reader.close()


def test_a_full_ring_has_room_again_when_the_oldest_is_taken():
    writer, reader = ring_of(CAPACITY)
    starts = [writer.put(bytes(300)) for _ in range(4)]
    assert starts == [0, 300, 600, None]
    assert reader.take(0, 300, bytes) == bytes(300)
    assert writer.put(bytes(300)) == CAPACITY  # in one piece, at the start of the memory
    assert writer.put(bytes(1)) is None
    assert writer.put(bytes(CAPACITY + 1)) is None


def test_an_empty_ring_begins_at_its_start_again():
    writer, reader = ring_of(CAPACITY)
    for _ in range(5):
        start = writer.put(bytes(10))
        assert start is not None
        assert start % CAPACITY == 0
        reader.take(start, 10, bytes)


def test_large_messages_through_a_ring_keep_their_place_among_the_others(links: tuple[CoreLink, CoreLink]):
    """Also the one for which there is no room in it."""
    sender, receiver = links
    sent = [b"first", b"a" * LARGE, b"b" * LARGE, b"c" * LARGE, b"last"]
    for message in sent:
        sender.send(message)
    received: list[bytes] = []
    while len(received) < len(sent):
        received += receiver.receive()
        sender.flush()
    assert received == sent


def test_messages_are_read_one_by_one(links: tuple[CoreLink, CoreLink]):
    """Whoever stops in between is told that there are more, and has not given back what it did not read."""
    sender, receiver = links
    sent = [b"first", b"a" * LARGE, b"b" * LARGE]
    for message in sent:
        sender.send(message)
    assert receiver.receive_one(bytes) == sent[0]
    assert receiver.receive_one(len) == LARGE
    assert receiver.has_unread
    sender.send(b"c" * LARGE)  # in the room of the first
    assert not sender.has_unsent
    assert receiver.receive_one(bytes) == sent[2]
    assert receiver.receive_one(bytes) == b"c" * LARGE
    assert not receiver.has_unread
    assert receiver.receive_one(bytes) is None


def test_what_goes_through_the_ring_does_not_wait_for_the_reader(links: tuple[CoreLink, CoreLink]):
    sender, _ = links
    for _ in range(2):
        sender.send(bytes(LARGE))
    assert not sender.has_unsent
    for _ in range(8):
        sender.send(bytes(LARGE))
    assert sender.has_unsent


def _answer_with_sizes(end: socket.socket) -> None:
    end.setblocking(True)
    reader = accept_ring(end)
    link = CoreLink(end, incoming=reader)
    messages: list[bytes] = []
    while len(messages) < 5:
        messages += link.receive()
    for message in messages:
        assert message == message[:1] * len(message)
        link.send(f"{len(message)} of {message[:1].decode()}".encode())
    link.close(linger_s=10.0)


def test_another_process_reads_what_this_one_writes():
    ours, its = socket.socketpair()
    with its:
        process = multiprocessing.get_context("spawn").Process(target=_answer_with_sizes, args=(its,))
        process.start()
    link = CoreLink(ours, outgoing=offer_ring(ours))
    for letter in b"abcde":
        link.send(bytes([letter]) * LARGE)
    process.join(60)
    assert link.receive() == [f"{LARGE} of {letter}".encode() for letter in "abcde"]
    link.close()


def test_a_side_that_has_ended_shares_nothing():
    ours, its = socket.socketpair()
    ours.close()
    with its, pytest.raises(ConnectionError):
        accept_ring(its)
