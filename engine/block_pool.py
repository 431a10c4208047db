"""The paged KV pool: a free-block queue over one tensor of keys and values.

Keys are kept un-rotated (before RoPE): a position is nothing but the index of a token in its
context, so compaction, recall and restore move or exchange blocks and never touch a key.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dayshift.engine import kernels
from dayshift.engine.config import KVCacheDType
from dayshift.engine.models.config import ModelConfig
from dayshift.engine.quant.kv import POOL_DTYPES, SCALE_BYTES, is_quantized


@dataclass(slots=True, eq=False)
class Context:
    """The tokens of a request or a session, and where their KV lies.

    The first `num_computed` tokens have their KV in the pool; token i is in block
    `block_table[i // block_size]` at offset `i % block_size`.
    """

    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one context that are computed in a step: a decode (1), or part of a prompt.

    `needs_sampling`: the chunk reaches the end of the context, so its last logits choose a token.
    `draft_ids`: guesses of the tokens after that end, computed with it; each has logits of its own.
    """

    context: Context
    num_tokens: int
    needs_sampling: bool
    draft_ids: tuple[int, ...] = ()

    @property
    def num_queries(self) -> int:
        """Tokens that the step computes of this context."""
        return self.num_tokens + len(self.draft_ids)

    @property
    def num_logits(self) -> int:
        """Rows of logits of this chunk, if it needs sampling."""
        return 1 + len(self.draft_ids)


class Arrival(Protocol):
    """KV that is on its way into blocks of the pool, the first layers first."""

    def land(self, num_layers: int) -> bool:
        """Write what is not yet there of the first `num_layers` layers; whether nothing is left to come."""
        ...


class BlockPool:
    """Hands out KV blocks and moves KV between them and contiguous pieces.

    `kv_cache_dtype` int8 or fp8: keys and values are quantised (`quant.kv`), and read as float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache_dtype: KVCacheDType = "auto",
    ) -> None:
        self.config = config
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.model_dtype = dtype  # of the keys and values that a step stores
        row_size, row_dtype = config.head_dim, dtype
        self.exact_codec = "raw"  # of KV at rest: reads back bit by bit
        if kv_cache_dtype != "auto":
            row_size, row_dtype = config.head_dim + SCALE_BYTES, POOL_DTYPES[kv_cache_dtype]
            self.exact_codec = kv_cache_dtype
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, row_size)
        self.kv = torch.zeros(shape, dtype=row_dtype, device=device)
        self._free: deque[int] = deque(range(num_blocks))
        self._num_holders = [0] * num_blocks  # contexts that have the block in their table
        self._arrivals: list[Arrival] = []

    @property
    def dtype(self) -> torch.dtype:
        """Of the values that `read` returns."""
        return torch.float32 if is_quantized(self.kv) else self.kv.dtype

    @property
    def device(self) -> torch.device:
        return self.kv.device

    @property
    def num_kv_heads(self) -> int:
        """Of the pieces that are read and written."""
        return self.config.num_kv_heads

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens of one context take."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, context: Context, num_tokens: int, num_kept: int | None = None) -> int:
        """How many free blocks `context` needs, to hold `num_tokens` tokens and write to all of them but
        the first `num_kept` (default: those that are computed)."""
        start = context.num_computed if num_kept is None else num_kept
        num_shared = sum(self._num_holders[i] > 1 for i in context.block_table[start // self.block_size :])
        return max(0, self.num_blocks_for(num_tokens) - len(context.block_table)) + num_shared

    def reserve(self, context: Context, num_tokens: int) -> None:
        """Give `context` the blocks it lacks for `num_tokens` tokens, and blocks of its own for those that
        are not computed yet; the caller has checked `num_free`."""
        table = context.block_table
        for place in range(context.num_computed // self.block_size, len(table)):
            if self._num_holders[table[place]] > 1:
                self._copy_on_write(context, place)
        num_lacking = self.num_blocks_for(num_tokens) - len(table)
        table += [self._take() for _ in range(num_lacking)]

    def share(self, context: Context) -> Context:
        """A second context with the same tokens, in the same blocks until one of the two writes to them."""
        for block_id in context.block_table:
            self._num_holders[block_id] += 1
        return Context(list(context.token_ids), context.num_computed, list(context.block_table))

    def trim(self, context: Context) -> None:
        """Take back the blocks beyond the context's tokens."""
        keep = self.num_blocks_for(len(context.token_ids))
        self._give_back(context.block_table[keep:])
        del context.block_table[keep:]

    def release(self, context: Context) -> None:
        """Take back all blocks; nothing of the context is computed any more."""
        self._give_back(context.block_table)
        context.block_table.clear()
        context.num_computed = 0

    def slots(self, context: Context, start: int, end: int) -> list[int]:
        """Slots (block_id * block_size + offset) of the tokens [start, end)."""
        size, table = self.block_size, context.block_table
        return [table[i // size] * size + i % size for i in range(start, end)]

    def read(self, context: Context, start: int, end: int) -> Tensor:
        """A copy of the KV of tokens [start, end): (2, num_layers, num_tokens, num_kv_heads, head_dim)."""
        return self.read_slots(self.slots(context, start, end))

    def write(self, context: Context, start: int, piece: Tensor) -> None:
        """Put a piece as `read` returns it at tokens [start, start + num_tokens)."""
        self.write_slots(self.slots(context, start, start + piece.shape[2]), piece)

    def read_slots(self, slots: list[int]) -> Tensor:
        """The same of the tokens in these slots."""
        self.land()
        return torch.stack(kernels.gather_kv(self.kv[0], self.kv[1], self._on_device(slots)))

    def write_slots(self, slots: list[int], piece: Tensor) -> None:
        """Put a piece as `read_slots` returns it there."""
        self.write_layers(slots, range(self.config.num_layers), piece)

    def write_layers(self, slots: list[int], layers: range, piece: Tensor) -> None:
        """Put these layers of a piece there: (2, len(layers), num_tokens, num_kv_heads, head_dim)."""
        keys, values = self.kv[:, layers.start : layers.stop]
        kernels.scatter_kv(piece[0], piece[1], keys, values, self._on_device(slots))

    @property
    def has_arrivals(self) -> bool:
        """KV of some layers is still on its way."""
        return bool(self._arrivals)

    def expect(self, arrival: Arrival) -> None:
        """KV of a context's blocks, which counts as computed from now on, comes when `land` asks for it.

        What was expected before lands now: each arrival holds device memory as large as what it brings.
        """
        self.land()
        self._arrivals.append(arrival)

    def land(self, num_layers: int | None = None) -> None:
        """Let all that is on its way of the first `num_layers` layers, default all, be in its blocks."""
        if self._arrivals:
            end = self.config.num_layers if num_layers is None else num_layers
            self._arrivals = [arrival for arrival in self._arrivals if not arrival.land(end)]

    def copy_block(self, source: int, target: int) -> None:
        """Copy all of a block onto another."""
        self.land()
        kernels.copy_blocks(self.kv[0], self.kv[1], self._on_device([source]), self._on_device([target]))

    def check(self, contexts: Iterable[Context]) -> None:
        """Raise AssertionError unless these contexts, all there are, hold each block as counted."""
        holders = Counter(block_id for context in contexts for block_id in context.block_table)
        counted = {block_id: num for block_id, num in enumerate(self._num_holders) if num}
        assert counted == holders, "blocks are held by other contexts than counted"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(holders), "a block that is held is free"
        assert len(free) + len(holders) == self.num_blocks, "a block is neither held nor free"

    def _take(self) -> int:
        block_id = self._free.popleft()
        self._num_holders[block_id] = 1
        return block_id

    def _give_back(self, block_ids: Iterable[int]) -> None:
        self.land()  # before the blocks are another's
        for block_id in block_ids:
            self._num_holders[block_id] -= 1
            if self._num_holders[block_id] == 0:
                self._free.append(block_id)

    def _copy_on_write(self, context: Context, place: int) -> None:
        """Replace a shared block of the table by one that only this context has."""
        shared = context.block_table[place]
        context.block_table[place] = own = self._take()
        self._give_back([shared])
        if context.num_computed > place * self.block_size:
            self.copy_block(shared, own)

    def _on_device(self, ids: list[int]) -> Tensor:
        # Pinned, so that the host does not wait: a restore brings many pieces.
        return torch.tensor(ids, dtype=torch.int64, pin_memory=self.kv.is_cuda).to(
            self.kv.device, non_blocking=True
        )
