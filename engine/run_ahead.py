"""The next decode step, launched before the last one's tokens are read.

While the host reads tokens, finishes requests and tells clients, the device computes already: a step
takes as long as the longer of the two, not as both. It is sound because a step's input is on the
device; what the host finds out too late (a sequence has ended, a request was cancelled) costs the
discarded part of one step. Keys and values that such a part wrote lie behind the end of their context,
in blocks whose next owner writes them later in the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dayshift.engine.block_pool import Context
from dayshift.engine.model_runner import LaunchedLogits
from dayshift.engine.scheduler import Scheduler, SequenceChunk
from dayshift.engine.sequence import SequenceStatus


class RunAhead:
    """Holds at most one step that is on its way. `run` None: never launches any."""

    def __init__(
        self,
        scheduler: Scheduler,
        run: Callable[[Sequence[Context], Tensor], LaunchedLogits] | None,
        would_draft: Callable[[Sequence[SequenceChunk]], bool],
    ) -> None:
        self._scheduler, self._run, self._would_draft = scheduler, run, would_draft
        self._step: tuple[list[SequenceChunk], LaunchedLogits] | None = None

    def launch(self, chunks: Sequence[SequenceChunk], token_ids: Tensor) -> None:
        """Launch the decode step after this one, whose tokens are int64 (num_chunks,) on the device.

        Nothing is launched unless every running sequence goes on to decode, and no draw needs the host; nor
        where drafts pay: they are made from tokens that the host has read.
        """
        if self._run is None or len(chunks) < len(self._scheduler.running):
            return
        if any(not chunk.needs_sampling or chunk.sequence.sampler.needs_host for chunk in chunks):
            return
        if any(chunk.draft_ids for chunk in chunks) or self._would_draft(chunks):
            return
        rows = [row for row, chunk in enumerate(chunks) if not _is_last(chunk)]
        if not rows:
            return
        if len(rows) < len(chunks):
            token_ids = token_ids[torch.tensor(rows, device=token_ids.device)]
        ahead = [_next(chunks[row]) for row in rows]
        self._step = ahead, self._run([chunk.context for chunk in ahead], token_ids)

    def take(self) -> tuple[list[SequenceChunk], Tensor] | None:
        """The launched step's chunks and logits, without the sequences that have ended; None if nothing is
        left of it. Marks the chunks' tokens as computed."""
        step, self._step = self._step, None
        if step is None:
            return None
        chunks, launched = step
        kept = [row for row, chunk in enumerate(chunks) if chunk.sequence.status is SequenceStatus.RUNNING]
        if not kept:
            return None
        for row in kept:
            chunks[row].context.num_computed += 1
        logits = launched.take()
        if len(kept) < len(chunks):
            logits = logits[torch.tensor(kept, device=logits.device)]
        return [chunks[row] for row in kept], logits


def _is_last(chunk: SequenceChunk) -> bool:
    """The token that this chunk draws is the last that the request may have."""
    return len(chunk.sequence.output_ids) + 1 >= chunk.sequence.sampling.max_tokens


def _next(chunk: SequenceChunk) -> SequenceChunk:
    return SequenceChunk(context=chunk.context, num_tokens=1, needs_sampling=True, sequence=chunk.sequence)
