"""The paged KV pool: a free-block queue over one tensor of keys and values.

Keys are kept un-rotated (before RoPE): a position is nothing but the index of a token in its
context, so compaction, recall and restore move or exchange blocks and never touch a key.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dayshift.engine import kernels
from dayshift.engine.models.config import ModelConfig


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
    """

    context: Context
    num_tokens: int
    needs_sampling: bool


class BlockPool:
    """Hands out KV blocks and moves KV between them and contiguous pieces."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        shape = (2, config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        self._free: deque[int] = deque(range(num_blocks))

    @property
    def dtype(self) -> torch.dtype:
        """Of the values that `read` returns."""
        return self.kv.dtype

    @property
    def device(self) -> torch.device:
        return self.kv.device

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens of one context take."""
        return -(-num_tokens // self.block_size)

    def num_missing(self, context: Context, num_tokens: int) -> int:
        """How many blocks `context` lacks to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(context.block_table))

    def reserve(self, context: Context, num_tokens: int) -> None:
        """Give `context` the blocks it lacks for `num_tokens` tokens; the caller has checked `num_free`."""
        for _ in range(self.num_missing(context, num_tokens)):
            context.block_table.append(self._free.popleft())

    def trim(self, context: Context) -> None:
        """Take back the blocks beyond the context's tokens."""
        keep = self.num_blocks_for(len(context.token_ids))
        self._free.extend(context.block_table[keep:])
        del context.block_table[keep:]

    def release(self, context: Context) -> None:
        """Take back all blocks; nothing of the context is computed any more."""
        self._free.extend(context.block_table)
        context.block_table.clear()
        context.num_computed = 0

    def slots(self, context: Context, start: int, end: int) -> list[int]:
        """Slots (block_id * block_size + offset) of the tokens [start, end)."""
        size, table = self.block_size, context.block_table
        return [table[i // size] * size + i % size for i in range(start, end)]

    def read(self, context: Context, start: int, end: int) -> Tensor:
        """A copy of the KV of tokens [start, end): (2, num_layers, num_tokens, num_kv_heads, head_dim)."""
        slots = self._slot_tensor(context, start, end)
        return torch.stack(kernels.gather_kv(self.kv[0], self.kv[1], slots))

    def write(self, context: Context, start: int, piece: Tensor) -> None:
        """Put a piece as `read` returns it at tokens [start, start + num_tokens)."""
        slots = self._slot_tensor(context, start, start + piece.shape[2])
        kernels.scatter_kv(piece[0], piece[1], self.kv[0], self.kv[1], slots)

    def _slot_tensor(self, context: Context, start: int, end: int) -> Tensor:
        return torch.tensor(self.slots(context, start, end), dtype=torch.int64, device=self.kv.device)
