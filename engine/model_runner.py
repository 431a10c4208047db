"""Runs the decoder on a step's chunks. The scheduler never sees a tensor; this never sees a queue."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from dayshift.engine.block_pool import BlockPool, Chunk
from dayshift.engine.models.decoder import AttentionBatch, Decoder


class ModelRunner:
    """The decoder together with the KV pool that it reads and writes."""

    def __init__(self, model: Decoder, pool: BlockPool) -> None:
        self.model = model
        self.pool = pool
        self.device = pool.kv.device

    def run(self, chunks: Seq[Chunk]) -> Tensor:
        """Compute the chunks' KV; float32 logits (num_sampled, vocab_size), one row for each chunk that
        `needs_sampling`, in order. Marks the chunks' tokens as computed."""
        token_ids, batch = self._prepare(chunks)
        hidden = self.model(token_ids, batch, self.pool.kv)
        ends = accumulate(chunk.num_tokens for chunk in chunks)
        rows = [end - 1 for chunk, end in zip(chunks, ends, strict=True) if chunk.needs_sampling]
        for chunk in chunks:
            chunk.context.num_computed += chunk.num_tokens
        return self.model.logits(hidden[torch.tensor(rows, dtype=torch.int64, device=self.device)])

    def _prepare(self, chunks: Seq[Chunk]) -> tuple[Tensor, AttentionBatch]:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        seq_lens: list[int] = []
        for chunk in chunks:
            context = chunk.context
            start, end = context.num_computed, context.num_computed + chunk.num_tokens
            token_ids += context.token_ids[start:end]
            positions += range(start, end)
            slots += self.pool.slots(context, start, end)
            seq_lens.append(end)
        max_blocks = max(self.pool.num_blocks_for(length) for length in seq_lens)
        tables = [_padded(chunk.context.block_table, max_blocks) for chunk in chunks]
        batch = AttentionBatch(
            positions=self._int32(positions),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=self.device),
            block_tables=self._int32(tables),
            seq_lens=self._int32(seq_lens),
            query_start=self._int32([0, *accumulate(chunk.num_tokens for chunk in chunks)]),
        )
        return torch.tensor(token_ids, dtype=torch.int64, device=self.device), batch

    def _int32(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _padded(block_table: list[int], length: int) -> list[int]:
    return block_table[:length] + [0] * (length - len(block_table))
