"""KV in host memory, between the GPU's blocks and the sessions' files: bounded, and allocated once.

The memory is cut into blocks as large as the GPU's over all layers (1.5 MiB for Qwen3-30B-A3B), so that
pieces of any length come and go without fragments, and copies are large. On CUDA the memory is pinned
and copies run on a stream of their own. A piece is kept as its codec wrote it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dayshift.engine.sessions.codecs import Encoded
from dayshift.engine.sessions.record_format import KVFormat
from dayshift.engine.sessions.records import KVPiece

PieceKey = tuple[str, int]
"""Session id and turn (or SYSTEM)."""

_ALIGNMENT = 256  # bytes; of what is copied together
_SEGMENT_BYTES = 1 << 30
_NUM_PINNING_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Piece:
    format: KVFormat
    block_ids: list[int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """Bytes on their way to the device."""

    buffer: Tensor
    payloads: list[Tensor]  # views of it
    arrival: torch.cuda.Event | None

    def wait(self) -> list[Tensor]:
        """The parcels, uint8 on the device. What the device does next waits for them; the host does not."""
        if self.arrival is not None:
            current = torch.cuda.current_stream(self.buffer.device)
            current.wait_event(self.arrival)
            self.buffer.record_stream(current)
        return self.payloads


class HostPool:
    """Pieces of KV by key, in order of their last use.

    Args:
        num_bytes: the most it ever holds; allocated here, and on CUDA pinned by threads, for which `wait`
            waits, and everything that is put.
        block_bytes: of one block.
        device: where pieces come from and go to.
    """

    def __init__(self, *, num_bytes: int, block_bytes: int, device: torch.device) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = num_bytes // block_bytes
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._segment_blocks = max(1, _SEGMENT_BYTES // block_bytes)
        sizes = [num * block_bytes for num in _split(self.num_blocks, self._segment_blocks)]
        self._memory = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._pins = _pin(self._memory) if self._stream is not None else []
        weakref.finalize(self, _unpin, self._pins)
        # By a piece's first block; good when the event is over.
        self._is_sound = torch.empty(self.num_blocks, dtype=torch.bool, pin_memory=self._stream is not None)
        self._unchecked: dict[PieceKey, torch.cuda.Event | None] = {}
        self._free = list(reversed(range(self.num_blocks)))  # the lowest ids are given first
        self._pieces: OrderedDict[PieceKey, _Piece] = OrderedDict()  # oldest use first

    def __contains__(self, key: PieceKey) -> bool:
        return key in self._pieces

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_pieces(self) -> int:
        """Pieces that it holds."""
        return len(self._pieces)

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the blocks that hold a piece."""
        return (self.num_blocks - len(self._free)) * self.block_bytes

    def __iter__(self) -> Iterator[PieceKey]:
        """All pieces, oldest use first; not while any is put, got or dropped."""
        return iter(self._pieces)

    def wait(self) -> None:
        """Until all memory is pinned. Raises RuntimeError where it cannot be."""
        for pin in self._pins:
            pin.result()

    def keys_of(self, session_id: str) -> list[PieceKey]:
        """The pieces of a session, oldest use first."""
        return [key for key in self._pieces if key[0] == session_id]

    def num_blocks_for(self, num_bytes: int) -> int:
        """Blocks that a piece of this many bytes takes."""
        return -(-num_bytes // self.block_bytes)

    def put(self, key: PieceKey, encoded: Encoded) -> None:
        """Keep a copy of a piece, one byte or more. The caller has made room.

        The copy is ordered after what the device does now; the payload is not to be written to.
        """
        self.wait()
        payload, is_sound = encoded.payload, encoded.is_sound
        num_bytes = payload.numel()
        block_ids = [self._free.pop() for _ in range(self.num_blocks_for(num_bytes))]
        self._pieces[key] = piece = _Piece(encoded.form, block_ids, num_bytes)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            payload.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            place = 0
            for part in self._parts(piece):
                part.copy_(payload[place : place + part.numel()], non_blocking=True)
                place += part.numel()
            if is_sound is not None:
                self._is_sound[block_ids[0]].copy_(is_sound, non_blocking=True)
        if is_sound is not None:
            if self._stream is not None:
                is_sound.record_stream(self._stream)
            self._unchecked[key] = self._event()

    def is_sound(self, key: PieceKey) -> bool:
        """Whether a piece holds the KV that it was made of. Waits for its copy, if nobody asked yet."""
        if key in self._unchecked:
            if (copied := self._unchecked[key]) is not None:
                copied.synchronize()
            if not self._is_sound[self._pieces[key].block_ids[0]]:
                return False
            del self._unchecked[key]
        return True

    def touch(self, key: PieceKey) -> None:
        """It becomes the piece used last."""
        self._pieces.move_to_end(key)

    def get(self, key: PieceKey) -> tuple[KVFormat, list[Tensor]]:
        """A piece where it lies, as few uint8 views, one after the other; it becomes the one used last. For
        `deliver`: on CUDA the host itself may not read them yet."""
        self._pieces.move_to_end(key)
        piece = self._pieces[key]
        return piece.format, list(self._parts(piece))

    def deliver(self, parcels: Sequence[Sequence[Tensor]]) -> Delivery:
        """Start to copy parcels to the device, each some uint8 views on the host, one after the other.

        The copies wait for nothing but earlier ones: they run while the device computes.
        """
        sizes = [sum(view.numel() for view in parcel) for parcel in parcels]
        places = [0, *accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        with torch.cuda.stream(self._stream):  # the buffer's memory, too, is the stream's own
            buffer = torch.empty(places[-1], dtype=torch.uint8, device=self._device)
            for parcel, place in zip(parcels, places, strict=False):
                for view in parcel:
                    buffer[place : place + view.numel()].copy_(view, non_blocking=True)
                    place += view.numel()
        payloads = [buffer[place : place + size] for place, size in zip(places, sizes, strict=False)]
        return Delivery(buffer, payloads, self._event())

    def read(self, key: PieceKey) -> KVPiece:
        """A copy of a piece for an archive."""
        if self._stream is not None:
            self._stream.synchronize()
        piece = self._pieces[key]
        return KVPiece(piece.format, torch.cat(list(self._parts(piece))).numpy())

    def drop(self, key: PieceKey) -> None:
        """Forget a piece. A copy of it that is under way is done before its blocks are written again."""
        self._free.extend(reversed(self._pieces.pop(key).block_ids))
        self._unchecked.pop(key, None)

    def check(self) -> None:
        """Raise AssertionError unless each block is free or holds a part of one piece."""
        held = [block_id for piece in self._pieces.values() for block_id in piece.block_ids]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), "a host block is lost or doubled"

    def _event(self) -> torch.cuda.Event | None:
        """When the copies so far are done; None: they are."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _parts(self, piece: _Piece) -> Iterator[Tensor]:
        """The piece's memory, in as few views as it lies in."""
        num_left = piece.num_bytes
        for first, last in _runs(piece.block_ids, self._segment_blocks):
            segment, first_here = divmod(first, self._segment_blocks)
            num_bytes = min((last - first) * self.block_bytes, num_left)
            yield self._memory[segment].narrow(0, first_here * self.block_bytes, num_bytes)
            num_left -= num_bytes


def _pin(segments: Sequence[Tensor]) -> list[Future[int]]:
    """Begin to pin each; the addresses. Several threads touch the memory first: the driver makes pages in one
    thread, at some 1.2 GB/s."""
    device = torch.cuda.current_device()  # a new thread's would be the first one
    executor = ThreadPoolExecutor(_NUM_PINNING_THREADS, "dayshift-pin", torch.cuda.set_device, (device,))
    pins = [executor.submit(_pin_one, segment) for segment in segments]
    executor.shutdown(wait=False)  # what has begun is done
    return pins


def _pin_one(segment: Tensor) -> int:
    segment.zero_()
    error = _cudart().cudaHostRegister(segment.data_ptr(), segment.numel(), 0)
    torch.cuda.check_error(int(error))
    return segment.data_ptr()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _unpin(pins: Sequence[Future[int]]) -> None:
    for pin in pins:
        if pin.exception() is None:
            _cudart().cudaHostUnregister(pin.result())


def _split(num_blocks: int, segment_blocks: int) -> list[int]:
    """Blocks of each segment: all are full but the last."""
    return [min(segment_blocks, num_blocks - first) for first in range(0, num_blocks, segment_blocks)]


def _runs(block_ids: list[int], segment_blocks: int) -> Iterator[tuple[int, int]]:
    """Runs of consecutive ids in one segment, as (first, last + 1)."""
    start = 0
    for place in range(1, len(block_ids) + 1):
        is_end = place == len(block_ids) or block_ids[place] != block_ids[place - 1] + 1
        if is_end or block_ids[place] % segment_blocks == 0:
            yield block_ids[start], block_ids[place - 1] + 1
            start = place
