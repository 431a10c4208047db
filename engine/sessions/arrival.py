"""Stored KV on its way into the pool: groups of layers, the first ones first.

A step that restores a session needs the KV of its first layers long before that of its last. So all copies
to the device are started at once, group after group on a stream of their own, and a group is decoded and
written into its blocks when the step comes to its first layer: later groups cross meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dayshift.engine.block_pool import BlockPool, Context
from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.host_pool import Delivery, HostPool
from dayshift.engine.sessions.stored_piece import StoredPiece


class StoredArrival:
    """Pieces that come to stand one after the other in a context, behind what is computed of it.

    Their bytes were checked, and the blocks are the context's own, so nothing can fail any more. The pieces
    may leave their tiers once this is made: what comes into their place waits for the copies.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostPool,
        context: Context,
        pieces: Sequence[StoredPiece],  # one or more
        *,
        num_groups: int,
    ) -> None:
        self._pool = pool
        self._pieces = pieces
        self._num_tokens = sum(piece.num_tokens for piece in pieces)
        start = context.num_computed
        self._slots = pool.slots(context, start, start + self._num_tokens)
        groups = layer_groups(pool.config.num_layers, num_groups)
        self._groups: deque[tuple[range, Delivery]] = deque(
            (layers, host.deliver([piece.parts_of(layers) for piece in pieces])) for layers in groups
        )

    def land(self, num_layers: int) -> bool:
        """Write what is not yet there of the first `num_layers` layers; whether all of it is there now."""
        while self._groups and self._groups[0][0].start < num_layers:
            layers, delivery = self._groups.popleft()
            self._pool.write_layers(self._slots, layers, self._decoded(layers, delivery.wait()))
        return not self._groups

    def _decoded(self, layers: range, payloads: Sequence[Tensor]) -> Tensor:
        form = self._pieces[0].form
        shape = (2, len(layers), self._num_tokens, form.num_kv_heads, form.head_dim)
        kv = torch.empty(shape, dtype=self._pool.dtype, device=self._pool.device)
        place = 0
        for piece, payload in zip(self._pieces, payloads, strict=True):
            codecs.decode_layers(piece.form, payload, kv[:, :, place : place + piece.num_tokens])
            place += piece.num_tokens
        return kv


def layer_groups(num_layers: int, num_groups: int) -> list[range]:
    """The layers in so many groups, or one for each if there are fewer; sizes differ by at most one."""
    num_groups = min(num_groups, num_layers)
    borders = [index * num_layers // num_groups for index in range(num_groups + 1)]
    return [range(start, end) for start, end in pairwise(borders)]
