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
from dayshift.engine.speculation.draft_model import DraftModel
from dayshift.engine.speculation.drafting import FORCED, MADE, Drafting, Rate
from dayshift.engine.speculation.gate import MAX_DRAFTS, Candidate, Choice, DraftGate, Plan
from dayshift.engine.speculation.history import Draft, History
from dayshift.engine.tokenizer import Tokenizer

_MAX_HISTORY = 16_384  # tokens of a sequence in which drafts are looked for, the newest
_OWN_MEMORY, _COMMON_MEMORY = 0.9, 0.99  # what a judged token counts after each later one
_PRIOR_WEIGHT = 4.0  # tokens of the sequence's own that count as much as all others of the match length
_MAX_RATE = 0.99


@dataclass(slots=True)
class SpeculationCounts:
    """Tokens verified as drafts, those of them that were kept, and steps whose drafts would not pay. Of the
    first two, the draft model's; and tokens of contexts that it has computed."""

    drafted: int = 0
    accepted: int = 0
    declined_steps: int = 0
    drafted_by_model: int = 0
    accepted_of_model: int = 0
    model_context_tokens: int = 0


class Speculator:
    """Drafts for one engine's steps: from a sequence's history, its grammar, and a draft model if there is
    one."""

    def __init__(
        self, tokenizer: Tokenizer, *, is_on: bool = True, draft_model: DraftModel | None = None
    ) -> None:
        self._tokenizer, self._is_on = tokenizer, is_on
        self.draft_model = draft_model
        self.gate = DraftGate()
        self.counts = SpeculationCounts()
        self._rates = [Rate(2.0, 3.0) for _ in range(MADE + 1)]  # of all sequences, by match length
        self._making_s = 0.0  # what the draft model took in this step

    def add_drafts(self, chunks: Seq[SequenceChunk], max_tokens: int) -> list[SequenceChunk]:
        """The chunks of a step, with drafts where they pay; together at most `max_tokens` tokens."""
        drafts = [self._draft(chunk) for chunk in chunks]
        found, made = self._candidates(chunks, drafts)
        choice = self._choose(chunks, found, made)
        if choice.cap == 0:
            self.counts.declined_steps += any(drafts)
            return list(chunks)
        if choice.has_made:
            self._make_drafts(chunks, drafts, made, choice.cap)
        num_left = max_tokens - sum(chunk.num_tokens for chunk in chunks)
        result: list[SequenceChunk] = []
        for chunk, draft in zip(chunks, drafts, strict=True):
            draft_ids = () if draft is None else draft.token_ids[: max(0, min(choice.cap, num_left))]
            num_left -= len(draft_ids)
            result.append(replace(chunk, draft_ids=draft_ids))
        return result

    def would_draft(self, chunks: Seq[SequenceChunk]) -> bool:
        """Whether drafts pay for these chunks' sequences, as far as their tokens are known."""
        candidates = self._candidates(chunks, [self._draft(chunk) for chunk in chunks])
        return self._choose(chunks, *candidates).cap > 0

    def record(self, chunks: Seq[SequenceChunk], seconds: float) -> None:
        """A step of these chunks took so long."""
        num_drafts = sum(len(chunk.draft_ids) for chunk in chunks)
        self.counts.drafted += num_drafts
        self.counts.drafted_by_model += sum(len(c.draft_ids) for c in chunks if _is_made(c.sequence))
        num_tokens = sum(chunk.num_tokens for chunk in chunks) + num_drafts
        step_s, self._making_s = seconds - self._making_s, 0.0
        self.gate.record(num_tokens, step_s, num_seqs=len(chunks), num_drafts=num_drafts)

    def accept(self, sequence: Sequence) -> None:
        """A drafted token of the sequence was kept."""
        self.counts.accepted += 1
        self.counts.accepted_of_model += _is_made(sequence)

    def _candidates(
        self, chunks: Seq[SequenceChunk], drafts: Seq[Draft | None]
    ) -> tuple[list[Candidate | None], list[Candidate | None]]:
        """For each chunk what was drafted, and what the draft model would make if that promises more."""
        found: list[Candidate | None] = []
        made: list[Candidate | None] = []
        for chunk, draft in zip(chunks, drafts, strict=True):
            sequence, known, other = chunk.sequence, None, None
            if draft is not None:
                known = Candidate(len(draft.token_ids), self._rate(sequence, draft.match_length))
            if self.draft_model is not None and sequence.is_decoding and (room := _room(sequence)) > 0:
                other = Candidate(room, self._rate(sequence, MADE))
                if known is not None and known.expected(MAX_DRAFTS) >= other.expected(MAX_DRAFTS):
                    other = None
            found.append(known)
            made.append(other)
        return found, made

    def _choose(
        self, chunks: Seq[SequenceChunk], found: Seq[Candidate | None], made: Seq[Candidate | None]
    ) -> Choice:
        num_tokens, plan = sum(chunk.num_tokens for chunk in chunks), None
        candidates = [candidate for candidate in found if candidate is not None]
        if self.draft_model is not None and any(made):
            contexts = [chunk.context for chunk, other in zip(chunks, made, strict=True) if other is not None]
            mixed = [other or known for known, other in zip(found, made, strict=True)]
            plan = Plan(
                [candidate for candidate in mixed if candidate is not None],
                num_made=len(contexts),
                num_behind=sum(map(self.draft_model.num_behind, contexts)),
            )
        if not candidates and plan is None:
            return Choice()
        return self.gate.choose(num_tokens, len(chunks), candidates, plan)

    def _make_drafts(
        self,
        chunks: Seq[SequenceChunk],
        drafts: list[Draft | None],
        made: Seq[Candidate | None],
        num_tokens: int,
    ) -> None:
        """Let the draft model make drafts, which take the places of those that promised less."""
        assert self.draft_model is not None, "it was chosen"
        rows = [row for row, candidate in enumerate(made) if candidate is not None]
        proposals = self.draft_model.propose([chunks[row].context for row in rows], num_tokens)
        for row, token_ids in zip(rows, proposals.token_ids, strict=True):
            sequence = chunks[row].sequence
            draft = self._verifiable(sequence, Draft(token_ids[: _room(sequence)], MADE))
            if draft is not None and sequence.drafting is not None:
                sequence.drafting.draft = drafts[row] = draft
        self.counts.model_context_tokens += proposals.num_context_tokens
        self._making_s = proposals.rounds_s + proposals.contexts_s
        self.gate.record_made(
            proposals.num_drafted_for,
            proposals.rounds_s,
            num_tokens,
            proposals.num_context_tokens,
            proposals.contexts_s,
        )

    def _rate(self, sequence: Sequence, match_length: int) -> float:
        assert sequence.drafting is not None, "it is decoding"
        common, own = self._rates[match_length], sequence.drafting.rate_of(match_length)
        prior = common.num_right / common.num_judged
        rate = (_PRIOR_WEIGHT * prior + own.num_right) / (_PRIOR_WEIGHT + own.num_judged)
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
            drafting.rate_of(draft.match_length).add(is_right, _OWN_MEMORY)
            self._rates[draft.match_length].add(is_right, _COMMON_MEMORY)
            if not is_right:
                break

    def _new_draft(self, sequence: Sequence, history: History) -> Draft | None:
        """A draft that may be verified, from the history or the grammar."""
        grammar, num_tokens = sequence.sampler.grammar, _room(sequence)
        if num_tokens <= 0:
            return None
        draft = self._verifiable(sequence, history.draft(num_tokens))
        if grammar is not None:
            forced = grammar.allowed_part(self._tokenizer.encode(grammar.forced_text())[:num_tokens])
            if len(forced) > (0 if draft is None else len(draft.token_ids)):
                return Draft(forced, FORCED)
        return draft

    def _verifiable(self, sequence: Sequence, draft: Draft | None) -> Draft | None:
        """A draft without what the grammar forbids or what ends the output; None if nothing is left."""
        if draft is None:
            return None
        token_ids, grammar = draft.token_ids, sequence.sampler.grammar
        if grammar is not None or not sequence.sampling.ignore_eos:
            eos = self._tokenizer.eos_token_ids
            token_ids = tuple(takewhile(lambda token_id: token_id not in eos, token_ids))
        if grammar is not None:
            token_ids = grammar.allowed_part(token_ids)
        return replace(draft, token_ids=token_ids) if token_ids else None


def _room(sequence: Sequence) -> int:
    """Tokens that a draft may have: it leaves room for the one that the model adds to it."""
    return min(MAX_DRAFTS, sequence.sampling.max_tokens - len(sequence.output_ids) - 1)


def _is_made(sequence: Sequence) -> bool:
    """The sequence's last draft is the draft model's."""
    drafting = sequence.drafting
    return drafting is not None and drafting.draft is not None and drafting.draft.match_length == MADE


def _history(sequence: Sequence) -> History:
    """A sequence's context, behind the turns of its session that are not in it."""
    past = [] if sequence.session is None else _archived_token_ids(sequence.session)
    return History([*past, *sequence.context.token_ids][-_MAX_HISTORY:])


def _archived_token_ids(session: Session) -> list[int]:
    present = {entry.turn for entry in session.entries}
    turns = [turn for turn in session.turns if turn.index not in present]
    return [token_id for turn in turns for token_id in turn.token_ids]
