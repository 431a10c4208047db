"""Runs the decoder on a step's chunks. The scheduler never sees a tensor; this never sees a queue."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.block_tables import BlockTables
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.step_graphs import (
    StepGraphs,
    StepInputs,
    StepShape,
    aligned_prompt,
    compute_step,
)


class LaunchedLogits:
    """Logits of a step that was launched ahead. They are copied only if another step runs before they are
    taken: graphs overwrite each other's."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self._is_taken = False

    def take(self) -> Tensor:
        """The logits, good until the next step."""
        self._is_taken = True
        return self._logits

    def keep(self) -> None:
        """Another step is launched now."""
        if not self._is_taken:
            self._logits = self._logits.clone()


class ModelRunner:
    """The decoder together with the KV pool that it reads and writes.

    `graph_context`: on a CUDA device, steps with contexts of up to this many tokens are captured as
    graphs now, and replayed; None runs every step without graphs.
    """

    def __init__(
        self,
        model: Decoder,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_context: int,
        graph_context: int | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.device = pool.kv.device
        self.tables = BlockTables(
            num_rows=max_num_seqs, num_blocks=pool.num_blocks_for(max_context), device=self.device
        )
        self._launched: LaunchedLogits | None = None
        self.graphs = None
        if graph_context is not None:
            self.graphs = StepGraphs(model, pool, self.tables, max_context=max_context)
            self.graphs.capture(graph_context)

    def run(self, chunks: Seq[Chunk]) -> Tensor:
        """Compute the chunks' KV; logits (num_sampled, vocab_size), `num_logits` rows for each chunk
        that `needs_sampling`, in order, good until the next step. Marks the chunks' tokens as computed, but
        not their drafts: the caller does that with those that it keeps."""
        logits = self.compute(*self._inputs(chunks))
        for chunk in chunks:
            chunk.context.num_computed += chunk.num_tokens
        needs_sampling = [chunk.needs_sampling for chunk in chunks for _ in range(chunk.num_logits)]
        if all(needs_sampling):
            return logits[: len(needs_sampling)]
        sampled = [row for row, is_needed in enumerate(needs_sampling) if is_needed]
        return logits[torch.tensor(sampled, dtype=torch.int64, device=self.device)]

    def run_ahead(self, contexts: Seq[Context], token_ids: Tensor) -> LaunchedLogits:
        """Compute the KV of one more token of each context, which the host has not read yet.

        `token_ids` is int64 (num_contexts,) on the device. Returns logits (num_contexts, vocab_size). The
        caller marks the tokens as computed, if it keeps them.
        """
        starts = [context.num_computed for context in contexts]
        inputs = StepInputs(
            token_ids=[0] * len(contexts),
            rows=self.tables.rows(contexts),
            starts=starts,
            query_start=list(range(len(contexts) + 1)),
            num_drafts=[0] * len(contexts),
        )
        num_blocks = self.pool.num_blocks_for(max(starts) + 1)
        shape = StepShape(num_tokens=len(contexts), num_seqs=len(contexts), num_blocks=num_blocks)
        self._launched = LaunchedLogits(self.compute(inputs, shape, token_ids)[: len(contexts)])
        return self._launched

    def compute(self, inputs: StepInputs, shape: StepShape, token_ids: Tensor | None = None) -> Tensor:
        """Compute a step's KV; logits, as `compute_step`, good until the next step. `token_ids`,
        int64 on the device, take the places of the first that `inputs` has."""
        if self._launched is not None:
            self._launched.keep()
            self._launched = None
        fit = self.graphs.shape_for(shape) if self.graphs is not None else None
        if fit is None and self.graphs is not None:
            shape = aligned_prompt(shape)
        packed = inputs.pack(fit or shape, self.tables.padding_row, pin_memory=self.device.type == "cuda")
        if self.graphs is not None and fit is not None:
            self.pool.land()  # a graph waits for nothing inside
            return self.graphs.run(fit, packed, token_ids)
        packed = packed.to(self.device, non_blocking=True)
        if token_ids is not None:
            packed[: len(token_ids)] = token_ids
        prompt_lengths = inputs.prompt_lengths(shape.num_tokens) if shape.is_prompt else None
        return compute_step(self.model, self.pool, self.tables, packed, shape, prompt_lengths)

    def waits_by_layer(self, num_tokens: int) -> bool:
        """Whether KV for a step of so many tokens should come in groups of layers: on CUDA, where copies run
        beside the step, and without a graph, whose layers could not wait for them one by one."""
        shape = StepShape(num_tokens=num_tokens, num_seqs=1, num_blocks=1)
        has_graph = self.graphs is not None and self.graphs.shape_for(shape) is not None
        return self.device.type == "cuda" and not has_graph

    def with_small_pool(self, num_tokens: int) -> ModelRunner:
        """The same model on a pool of its own, for one context of at most so many tokens."""
        pool = BlockPool(self.model.config, **small_pool_options(self.pool, num_tokens))
        return ModelRunner(self.model, pool, max_num_seqs=1, max_context=num_tokens)

    def _inputs(self, chunks: Seq[Chunk]) -> tuple[StepInputs, StepShape]:
        token_ids: list[int] = []
        for chunk in chunks:
            start = chunk.context.num_computed
            token_ids += chunk.context.token_ids[start : start + chunk.num_tokens]
            token_ids += chunk.draft_ids
        inputs = StepInputs(
            token_ids=token_ids,
            rows=self.tables.rows([chunk.context for chunk in chunks]),
            starts=[chunk.context.num_computed for chunk in chunks],
            query_start=[0, *accumulate(chunk.num_queries for chunk in chunks)],
            num_drafts=[len(chunk.draft_ids) for chunk in chunks],
        )
        longest = max(chunk.context.num_computed + chunk.num_queries for chunk in chunks)
        shape = StepShape(
            num_tokens=len(token_ids),
            num_seqs=len(chunks),
            num_blocks=self.pool.num_blocks_for(longest),
            is_prompt=not any(inputs.starts) and len(token_ids) > len(chunks),
            num_drafts=sum(inputs.num_drafts),
        )
        return inputs, shape


def small_pool_options(like: BlockPool, num_tokens: int) -> dict[str, Any]:
    """What a pool like another one, but for so many tokens and never quantised, is made with."""
    return {
        "num_blocks": like.num_blocks_for(num_tokens),
        "block_size": like.block_size,
        "dtype": like.model_dtype,
        "device": like.device,
    }
