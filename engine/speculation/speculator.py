"""Adds drafts to a step's chunks where they pay, and learns how good they are.

A draft is only ever a guess: the model's own logits decide about each token of it, in the step that it
is part of. So nothing here can change an output, and what is forgotten here costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import takewhile

from dayshift.engine.scheduler import SequenceChunk
from dayshift.engine.sequence import Sequence
from dayshift.engine.sessions.session import Session
from dayshift.engine.speculation.drafting import Drafting, Rate
from dayshift.engine.speculation.gate import MAX_DRAFTS, Candidate, DraftGate
from dayshift.engine.speculation.history import MAX_MATCH, Draft, History
from dayshift.engine.tokenizer import Tokenizer

_MAX_HISTORY = 16_384  # tokens of a sequence in which drafts are looked for, the newest
_OWN_MEMORY, _COMMON_MEMORY = 0.9, 0.99  # what a judged token counts after each later one
_PRIOR_WEIGHT = 4.0  # tokens of the sequence's own that count as much as all others of the match length
_MAX_RATE = 0.99
_FORCED = 0  # in place of a match length: the grammar allows nothing else


@dataclass(slots=True)
class SpeculationCounts:
    """Tokens verified as drafts, those of them that were kept, and steps whose drafts would not pay."""

    drafted: int = 0
    accepted: int = 0
    declined_steps: int = 0


class Speculator:
    """Drafts for one engine's steps."""

    def __init__(self, tokenizer: Tokenizer, *, is_on: bool = True) -> None:
        self._tokenizer, self._is_on = tokenizer, is_on
        self.gate = DraftGate()
        self.counts = SpeculationCounts()
        self._rates = [Rate(2.0, 3.0) for _ in range(MAX_MATCH + 1)]  # of all sequences, by match length

    def add_drafts(self, chunks: Seq[SequenceChunk], max_tokens: int) -> list[SequenceChunk]:
        """The chunks of a step, with drafts where they pay; together at most `max_tokens` tokens."""
        drafts = [self._draft(chunk) for chunk in chunks]
        cap = self._cap(chunks, drafts)
        if cap == 0:
            self.counts.declined_steps += any(drafts)
            return list(chunks)
        num_left = max_tokens - sum(chunk.num_tokens for chunk in chunks)
        result: list[SequenceChunk] = []
        for chunk, draft in zip(chunks, drafts, strict=True):
            draft_ids = () if draft is None else draft.token_ids[: max(0, min(cap, num_left))]
            num_left -= len(draft_ids)
            result.append(replace(chunk, draft_ids=draft_ids))
        return result

    def would_draft(self, chunks: Seq[SequenceChunk]) -> bool:
        """Whether drafts pay for these chunks' sequences, as far as their tokens are known."""
        return self._cap(chunks, [self._draft(chunk) for chunk in chunks]) > 0

    def record(self, chunks: Seq[SequenceChunk], seconds: float) -> None:
        """A step of these chunks took so long."""
        num_drafts = sum(len(chunk.draft_ids) for chunk in chunks)
        self.counts.drafted += num_drafts
        num_tokens = sum(chunk.num_tokens for chunk in chunks) + num_drafts
        self.gate.record(num_tokens, seconds, num_seqs=len(chunks), num_drafts=num_drafts)

    def _cap(self, chunks: Seq[SequenceChunk], drafts: Seq[Draft | None]) -> int:
        candidates = [
            Candidate(len(draft.token_ids), self._rate(chunk.sequence, draft))
            for chunk, draft in zip(chunks, drafts, strict=True)
            if draft is not None
        ]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        return self.gate.choose(num_tokens, len(chunks), candidates) if candidates else 0

    def _rate(self, sequence: Sequence, draft: Draft) -> float:
        common, own = self._rates[draft.match_length], sequence.drafting
        assert own is not None, "it has a draft"
        prior = common.num_right / common.num_judged
        rate = (_PRIOR_WEIGHT * prior + own.rate.num_right) / (_PRIOR_WEIGHT + own.rate.num_judged)
        return min(rate, _MAX_RATE)

    def _draft(self, chunk: SequenceChunk) -> Draft | None:
        """What may follow a decoding sequence's tokens; made anew when tokens came."""
        sequence = chunk.sequence
        if not (self._is_on and sequence.is_decoding):
            return None
        token_ids, drafting = sequence.context.token_ids, sequence.drafting
        if drafting is None:
            sequence.drafting = drafting = Drafting(_history(sequence), len(token_ids))
            drafting.draft = self._new_draft(sequence, drafting.history)
        elif drafting.num_seen < len(token_ids):
            self._judge(drafting, token_ids[drafting.num_seen :])
            for token_id in token_ids[drafting.num_seen :]:
                drafting.history.append(token_id)
            drafting.num_seen = len(token_ids)
            drafting.draft = self._new_draft(sequence, drafting.history)
        return drafting.draft

    def _judge(self, drafting: Drafting, token_ids: Seq[int]) -> None:
        """Compare the last draft with what came, up to the first difference."""
        draft = drafting.draft
        if draft is None:
            return
        for drafted, token_id in zip(draft.token_ids, token_ids, strict=False):
            is_right = drafted == token_id
            drafting.rate.add(is_right, _OWN_MEMORY)
            self._rates[draft.match_length].add(is_right, _COMMON_MEMORY)
            if not is_right:
                break

    def _new_draft(self, sequence: Sequence, history: History) -> Draft | None:
        """A draft that may be verified: it leaves room for the token that the model adds to it, and holds
        nothing that the grammar forbids or that ends the output."""
        sampling, grammar = sequence.sampling, sequence.sampler.grammar
        num_tokens = min(MAX_DRAFTS, sampling.max_tokens - len(sequence.output_ids) - 1)
        if num_tokens <= 0:
            return None
        draft = history.draft(num_tokens)
        if draft is not None and not (sampling.ignore_eos and grammar is None):
            eos = self._tokenizer.eos_token_ids
            draft = replace(draft, token_ids=tuple(takewhile(lambda i: i not in eos, draft.token_ids)))
        if grammar is not None:
            allowed = () if draft is None else grammar.allowed_part(draft.token_ids)
            forced = grammar.allowed_part(self._tokenizer.encode(grammar.forced_text())[:num_tokens])
            if len(forced) > len(allowed):
                return Draft(forced, _FORCED)
            draft = draft and replace(draft, token_ids=allowed)
        return draft if draft is not None and draft.token_ids else None


def _history(sequence: Sequence) -> History:
    """A sequence's context, behind the turns of its session that are not in it."""
    past = [] if sequence.session is None else _archived_token_ids(sequence.session)
    return History([*past, *sequence.context.token_ids][-_MAX_HISTORY:])


def _archived_token_ids(session: Session) -> list[int]:
    present = {entry.turn for entry in session.entries}
    turns = [turn for turn in session.turns if turn.index not in present]
    return [token_id for turn in turns for token_id in turn.token_ids]
