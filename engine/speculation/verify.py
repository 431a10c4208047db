"""Verifying drafts: the model's choice behind each of them, sampled as if they had come one by one.

A draft is kept while it is the token that the model chooses there; the first choice that differs is kept
in its place, and what was drafted behind it is dropped. Each choice takes the number of the request's
random stream that it would have taken without drafts. So for a seed the output is the same as without,
and without one its distribution: a draft d is accepted with probability p(d), and a token that comes
instead follows the residual, p without d (Leviathan et al., arXiv:2211.17192, for a draft that is certain).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from dayshift.engine.api import TokenLogprob
from dayshift.engine.penalties import Penalties
from dayshift.engine.sampler import RequestSampler, SampledRow, SampledTokens
from dayshift.engine.scheduler import SequenceChunk

Draws = list[tuple[int, TokenLogprob | None]]
"""Tokens, with log probabilities where the request asks for them."""


class DraftedRow:
    """A request as it stands behind some of its drafts, see `sampler.SampledRow`."""

    def __init__(
        self, sampler: RequestSampler, penalties: Penalties | None, mask: NDArray[np.int32] | None
    ) -> None:
        self.params, self.penalties = sampler.params, penalties
        self._sampler, self._mask = sampler, mask
        self.drawn: tuple[float, ...] = ()

    def draw(self) -> float:
        """The next number of the request's stream."""
        self.drawn = (self._sampler.draw(),)
        return self.drawn[0]

    def allowed_mask(self) -> NDArray[np.int32] | None:
        """Tokens that the grammar allows there."""
        return self._mask


def rows_of(chunk: SequenceChunk) -> list[SampledRow]:
    """What a chunk's rows of logits are sampled for: the token after the context, and after each draft."""
    sampler, draft_ids = chunk.sequence.sampler, chunk.draft_ids
    if not chunk.needs_sampling:
        return []
    if not draft_ids:
        return [sampler]
    grammar, penalties = sampler.grammar, sampler.penalties
    masks = [None] * (len(draft_ids) + 1) if grammar is None else grammar.masks_along(draft_ids)
    return [
        DraftedRow(sampler, None if penalties is None else penalties.after(draft_ids[:num]), mask)
        for num, mask in enumerate(masks)
    ]


def kept_draws(
    chunks: Sequence[SequenceChunk], rows: Sequence[Sequence[SampledRow]], sampled: SampledTokens
) -> list[Draws]:
    """What counts of the draws for each chunk's rows: those that are its drafts, up to the first that is
    none, and that one. Penalties and random streams are left as if no others had been drawn."""
    draws = zip(sampled.token_ids, sampled.logprobs, strict=True)
    return [_kept(chunk, row, [*islice(draws, len(row))]) for chunk, row in zip(chunks, rows, strict=True)]


def _kept(chunk: SequenceChunk, rows: Sequence[SampledRow], draws: Draws) -> Draws:
    if not chunk.draft_ids:
        return draws
    pairs = zip(chunk.draft_ids, draws, strict=False)
    num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1][0], pairs))
    kept, sampler = draws[: num_accepted + 1], chunk.sequence.sampler
    if sampler.penalties is not None:
        for token_id, _ in kept:
            sampler.penalties.count(token_id)
    dropped = (row for row in rows[len(kept) :] if isinstance(row, DraftedRow))
    sampler.give_back([number for row in dropped for number in row.drawn])
    return kept
