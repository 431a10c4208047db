"""Decides what runs in a step: decodes first, then prefill chunks within the token budget, which is large
where nothing decodes: a prompt by itself is computed whole.

All blocks that a sequence can ever need are taken when it is admitted, so a running sequence never
waits for a block and admission cannot deadlock or thrash.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from itertools import count

from dayshift.engine.block_pool import Chunk
from dayshift.engine.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceChunk(Chunk):
    """A chunk, and the sequence that it belongs to."""

    sequence: Sequence


class Scheduler:
    """Queues of waiting and running sequences."""

    def __init__(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, max_num_tokens_beside_decodes: int
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_tokens_beside_decodes = max_num_tokens_beside_decodes
        self.running: list[Sequence] = []
        self._arrivals = count()
        self._waiting: list[tuple[int, int, Sequence]] = []  # sorted by (-priority, arrival)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> list[Sequence]:
        """In the order in which they will be admitted."""
        return [sequence for _, _, sequence in self._waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence: higher priority first, then in order of arrival."""
        item = (-sequence.request.priority, next(self._arrivals), sequence)
        insort(self._waiting, item, key=lambda item: item[:2])

    def next_waiting(self) -> Sequence | None:
        """The sequence to be admitted next, if there is room for one more. Those whose sessions are not ready
        for a call are passed by: the last turn is being closed, or KV is being read."""
        if len(self.running) >= self.max_num_seqs:
            return None
        return next((s for _, _, s in self._waiting if s.session is None or s.session.is_ready), None)

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the running ones; its blocks are reserved."""
        self._drop(sequence)
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is."""
        if sequence.status is SequenceStatus.WAITING:
            self._drop(sequence)
        else:
            self.running.remove(sequence)
        sequence.status = SequenceStatus.FINISHED

    @property
    def num_prompt_tokens_in_step(self) -> int:
        """How many tokens of prompts a step computes now; at least one, to reckon with."""
        return max(1, self._room_beside(sum(sequence.is_decoding for sequence in self.running)))

    def schedule(self) -> list[SequenceChunk]:
        """The chunks of the next step; empty when nothing runs."""
        chunks = [_chunk(sequence, 1) for sequence in self.running if sequence.is_decoding]
        budget = self._room_beside(len(chunks))
        for sequence in self.running:
            if budget <= 0:
                break
            if not sequence.is_decoding:
                chunks.append(_chunk(sequence, min(budget, sequence.num_uncomputed)))
                budget -= chunks[-1].num_tokens
        return chunks

    def _room_beside(self, num_decodes: int) -> int:
        if num_decodes == 0:
            return self.max_num_batched_tokens
        # A prompt that arrives must not hold up those that decode.
        return min(self.max_num_batched_tokens, self.max_num_tokens_beside_decodes) - num_decodes

    def _drop(self, sequence: Sequence) -> None:
        self._waiting.remove(next(item for item in self._waiting if item[2] is sequence))


def _chunk(sequence: Sequence, num_tokens: int) -> SequenceChunk:
    is_last = num_tokens == sequence.num_uncomputed
    return SequenceChunk(
        context=sequence.context,
        num_tokens=num_tokens,
        needs_sampling=is_last and not sequence.is_closing,
        sequence=sequence,
    )
