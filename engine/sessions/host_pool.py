"""KV in host memory, between the GPU's blocks and the sessions' files: bounded, and allocated once.

The memory is cut into blocks as large as the GPU's over all layers (1.5 MiB for Qwen3-30B-A3B), so that
pieces of any length come and go without fragments, and copies are large. On CUDA the memory is pinned
and copies run on a stream of their own. A piece is kept as its codec wrote it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dayshift.engine.sessions.record_format import KVFormat
from dayshift.engine.sessions.records import KVPiece

PieceKey = tuple[str, int]
"""Session id and turn (or SYSTEM)."""


@dataclass(frozen=True, slots=True)
class _Piece:
    format: KVFormat
    block_ids: list[int]
    num_bytes: int


class HostPool:
    """Pieces of KV by key, in order of their last use.

    Args:
        num_bytes: the most it ever holds; allocated (on CUDA: pinned) here.
        block_bytes: of one block.
        device: where pieces come from and go to.
    """

    def __init__(self, *, num_bytes: int, block_bytes: int, device: torch.device) -> None:
        self.block_bytes = block_bytes
        self.num_blocks = num_bytes // block_bytes
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._data = torch.empty(
            self.num_blocks * block_bytes, dtype=torch.uint8, pin_memory=self._stream is not None
        )
        self._free = list(reversed(range(self.num_blocks)))  # the lowest ids are given first
        self._pieces: OrderedDict[PieceKey, _Piece] = OrderedDict()  # oldest use first

    def __contains__(self, key: PieceKey) -> bool:
        return key in self._pieces

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_used_bytes(self) -> int:
        """Bytes of the blocks that hold a piece."""
        return (self.num_blocks - len(self._free)) * self.block_bytes

    @property
    def oldest(self) -> PieceKey:
        """The piece whose last use is longest ago; there has to be one."""
        return next(iter(self._pieces))

    def keys(self) -> Iterator[PieceKey]:
        """All pieces, oldest use first; not while any is put, got or dropped."""
        return iter(self._pieces)

    def keys_of(self, session_id: str) -> list[PieceKey]:
        """The pieces of a session, oldest use first."""
        return [key for key in self._pieces if key[0] == session_id]

    def num_blocks_for(self, num_bytes: int) -> int:
        """Blocks that a piece of this many bytes takes."""
        return -(-num_bytes // self.block_bytes)

    def put(self, key: PieceKey, form: KVFormat, payload: Tensor) -> None:
        """Keep a copy of a piece's bytes, uint8 (num_bytes,) on the device. The caller has made room.

        The copy is ordered after what the device does now; the payload is not to be written to.
        """
        num_bytes = payload.numel()
        piece = _Piece(form, [self._free.pop() for _ in range(self.num_blocks_for(num_bytes))], num_bytes)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            payload.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            for place, part in self._parts(piece):
                part.copy_(payload[place : place + part.numel()], non_blocking=True)
        self._pieces[key] = piece

    def get(self, key: PieceKey) -> tuple[KVFormat, Tensor]:
        """A copy of a piece on the device, as it was put; it becomes the one used last.

        What the device does next waits for this copy, and the copy for nothing but earlier ones: pieces
        that are got one after the other arrive while the ones before are decoded.
        """
        self._pieces.move_to_end(key)
        piece = self._pieces[key]
        with torch.cuda.stream(self._stream):  # its memory, too, is the stream's own
            payload = torch.empty(piece.num_bytes, dtype=torch.uint8, device=self._device)
            for place, part in self._parts(piece):
                payload[place : place + part.numel()].copy_(part, non_blocking=True)
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            payload.record_stream(current)
        return piece.format, payload

    def read(self, key: PieceKey) -> KVPiece:
        """A copy of a piece for an archive."""
        if self._stream is not None:
            self._stream.synchronize()
        piece = self._pieces[key]
        return KVPiece(piece.format, torch.cat([part for _, part in self._parts(piece)]).numpy())

    def drop(self, key: PieceKey) -> None:
        """Forget a piece. A copy of it that is under way is done before its blocks are written again."""
        self._free.extend(reversed(self._pieces.pop(key).block_ids))

    def check(self) -> None:
        """Raise AssertionError unless each block is free or holds a part of one piece."""
        held = [block_id for piece in self._pieces.values() for block_id in piece.block_ids]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), "a host block is lost or doubled"

    def _parts(self, piece: _Piece) -> Iterator[tuple[int, Tensor]]:
        """The piece's memory in as few views as it lies in: (place in the payload, view)."""
        place = 0
        for first, last in _runs(piece.block_ids):
            start = first * self.block_bytes
            end = min(last * self.block_bytes, start + piece.num_bytes - place)
            yield place, self._data[start:end]
            place += end - start


def _runs(block_ids: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive ids, as (first, last + 1)."""
    start = 0
    for place in range(1, len(block_ids) + 1):
        if place == len(block_ids) or block_ids[place] != block_ids[place - 1] + 1:
            yield block_ids[start], block_ids[place - 1] + 1
            start = place
