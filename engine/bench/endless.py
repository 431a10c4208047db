"""A long text read through a session with a small window: `dayshift bench endless`.

The text comes as turns of equal length; each is appended, predicted token by token, and committed as an
answered turn is. Only the first token of a turn, which no call predicts, is left out. On a sample of
turns the same context is computed afresh, and predicts the same turn: what the session lost by moving its
KV, again and again, is the difference.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from dayshift.engine.api import FinishReason, SamplingParams, SessionConfig, TurnRequest
from dayshift.engine.block_pool import Chunk, Context
from dayshift.engine.engine import Engine
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.output import OutputText
from dayshift.engine.sampler import RequestSampler
from dayshift.engine.scoring import score_next
from dayshift.engine.sequence import Sequence as EngineSequence
from dayshift.engine.sessions.session import Session
from dayshift.types import DayshiftError

SYSTEM = "You read a long text and remember it."


@dataclass(frozen=True, slots=True, kw_only=True)
class EndlessRow:
    """A stretch of the text.

    `sampled_perplexity` and `fresh_perplexity` are of the same turns: in the session, and after the same
    context was computed afresh. Times are CPU time on a CPU, so that other programs do not count.
    """

    first_token: int
    num_tokens: int
    perplexity: float
    num_sampled: int  # tokens
    sampled_perplexity: float
    fresh_perplexity: float
    max_position: int
    max_computed: int  # prompt tokens of one turn
    num_compactions: int
    median_turn_ms: float
    slowest_turn_ms: float
    slowest_compaction_ms: float  # of the turns that made others leave; 0 without one

    @property
    def ratio(self) -> float:
        """Of the perplexities: what moving KV costs."""
        return self.sampled_perplexity / self.fresh_perplexity


def overall_ratio(rows: Sequence[EndlessRow]) -> float:
    """Of the perplexities of all sampled turns of these rows."""
    num_sampled = sum(row.num_sampled for row in rows)
    log_ratio = sum(row.num_sampled * math.log(row.ratio) for row in rows if row.num_sampled)
    return math.exp(log_ratio / num_sampled) if num_sampled else math.nan


@dataclass(slots=True)
class _Stretch:
    """What is counted until a row is full; log probabilities are summed."""

    num_tokens: int = 0
    num_predicted: int = 0
    log_prob: float = 0.0
    num_sampled: int = 0
    sampled_log_prob: float = 0.0
    fresh_log_prob: float = 0.0
    max_position: int = 0
    max_computed: int = 0
    turn_ms: list[float] = field(default_factory=list)
    compaction_ms: list[float] = field(default_factory=list)

    def row(self, first_token: int) -> EndlessRow:
        return EndlessRow(
            first_token=first_token,
            num_tokens=self.num_tokens,
            perplexity=_perplexity(self.log_prob, self.num_predicted),
            num_sampled=self.num_sampled,
            sampled_perplexity=_perplexity(self.sampled_log_prob, self.num_sampled),
            fresh_perplexity=_perplexity(self.fresh_log_prob, self.num_sampled),
            max_position=self.max_position,
            max_computed=self.max_computed,
            num_compactions=len(self.compaction_ms),
            median_turn_ms=statistics.median(self.turn_ms),
            slowest_turn_ms=max(self.turn_ms),
            slowest_compaction_ms=max(self.compaction_ms, default=0.0),
        )


def read_endless(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    window: int,
    turn_tokens: int,
    row_tokens: int,
    sample_every: int,
) -> Iterator[EndlessRow]:
    """A row for each `row_tokens` tokens of the text; every `sample_every`-th turn is also computed afresh.

    The engine's pool holds one window twice. Raises DayshiftError for a model that keeps no sessions.
    """
    reader = _Reader(engine, window)
    stretch, first_token = _Stretch(), 0
    for index, start in enumerate(range(0, len(token_ids) - turn_tokens + 1, turn_tokens)):
        turn_ids = token_ids[start : start + turn_tokens]
        reader.read_turn(turn_ids, stretch, is_sampled=index % sample_every == sample_every // 2)
        if stretch.num_tokens >= row_tokens:
            yield stretch.row(first_token)
            stretch, first_token = _Stretch(), start + turn_tokens
    if stretch.num_tokens:
        yield stretch.row(first_token)
    reader.close()


class _Reader:
    """One session that reads."""

    def __init__(self, engine: Engine, window: int) -> None:
        if not isinstance(engine.runner, ModelRunner):
            raise DayshiftError("this model runs on the transformers fallback, which keeps no sessions")
        self._engine, self._runner = engine, engine.runner
        info = engine.open_session(SessionConfig(system=SYSTEM, window=window, recall_budget=0))
        self._session: Session = engine.session_manager.get(info.session_id)
        self._clock = time.perf_counter if engine.pool.kv.is_cuda else time.process_time

    def read_turn(self, token_ids: Sequence[int], stretch: _Stretch, *, is_sampled: bool) -> None:
        """Take a turn through the session as a call does, but for sampling a reply."""
        manager, session = self._engine.session_manager, self._session
        started = self._clock()
        sequence = self._begin(token_ids)
        while (plan := manager.plan(sequence)) is None:
            manager.take_up(waits=True)
        if not manager.make_room(sequence, plan):
            raise DayshiftError("the engine has too few KV blocks for one window")
        manager.admit(sequence, plan)
        context = session.context
        num_layout = len(context.token_ids) - len(token_ids)
        log_prob = _log_prob(self._runner, context, num_layout)
        manager.commit(sequence, "", FinishReason.LENGTH)
        manager.close_turn(session)
        elapsed_ms = (self._clock() - started) * 1e3

        num_predicted = len(token_ids) - 1
        stretch.num_tokens += len(token_ids)
        stretch.num_predicted += num_predicted
        stretch.log_prob += log_prob
        stretch.turn_ms.append(elapsed_ms)
        if plan.archived:
            stretch.compaction_ms.append(elapsed_ms)
        stretch.max_position = max(stretch.max_position, len(context.token_ids) - 1)
        stretch.max_computed = max(
            stretch.max_computed, sequence.counts.computed + sequence.counts.recomputed
        )
        if is_sampled:
            stretch.num_sampled += num_predicted
            stretch.sampled_log_prob += log_prob
            stretch.fresh_log_prob += self._fresh_log_prob(context.token_ids, num_layout)

    def close(self) -> None:
        self._engine.close_session(self._session.session_id)

    def _begin(self, token_ids: Sequence[int]) -> EngineSequence:
        request = TurnRequest(
            request_id=f"turn-{len(self._session.turns)}",
            session_id=self._session.session_id,
            at=float(len(self._session.turns)),
            token_ids=tuple(token_ids),
            sampling=SamplingParams(max_tokens=1),
        )
        session, new_ids = self._engine.session_manager.begin(request)
        output = OutputText(self._engine.tokenizer, ())
        return EngineSequence(
            request, session.context, new_ids, output, RequestSampler(request.sampling, None), session
        )

    def _fresh_log_prob(self, token_ids: Sequence[int], num_context: int) -> float:
        """That of the tokens after the first `num_context`, when all are computed at once."""
        pool, context = self._engine.pool, Context(list(token_ids))
        pool.reserve(context, len(context.token_ids))
        log_prob = _log_prob(self._runner, context, num_context)
        pool.release(context)
        return log_prob


def _log_prob(runner: ModelRunner, context: Context, num_context: int) -> float:
    """Compute what a context lacks; the sum of the log probabilities of its tokens after `num_context`.

    The first of them is left out: in a session, the token before it was computed in another call.
    """
    if num_missing := num_context - context.num_computed:
        runner.run([Chunk(context=context, num_tokens=num_missing, needs_sampling=False)])
    turn_ids = context.token_ids[num_context:]
    log_probs = score_next(runner, context, len(turn_ids))[:-1]
    expected = torch.tensor(turn_ids[1:], device=log_probs.device)
    return log_probs.gather(1, expected[:, None]).double().sum().item()


def _perplexity(log_prob: float, num_tokens: int) -> float:
    return math.exp(-log_prob / num_tokens) if num_tokens else math.nan
