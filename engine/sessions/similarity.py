"""Which turns are about what the question is about, by the model's own keys: no second model.

A turn's vector is the mean of its stored, un-rotated keys in the middle layer. The question is computed
once, behind the end of the conversation, in a small pool of its own, for the same kind of vector. What
all turns have in common (their mean) is taken off, and the score is the cosine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayshift.engine.backend import Runner
from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.session import Session

_MAX_TOKENS = 512  # of conversation and question, their ends


class TurnSimilarity:
    """Scores a session's turns against a question. Its pool is made at the first use."""

    def __init__(self, runner: Runner, pool: BlockPool, tiers: KVTiers) -> None:
        self._model_runner = runner
        self._pool = pool
        self._tiers = tiers
        self._runner: ModelRunner | None = None

    def most_similar(
        self, session: Session, turns: list[int], question: list[int], *, num: int, min_score: float
    ) -> list[int]:
        """The `num` of `turns` that score best against the question's tokens, ascending.

        Left out: those below `min_score`, and those without KV.
        """
        vectors = {turn: vector for turn in turns if (vector := self._turn_vector(session, turn)) is not None}
        if not vectors:
            return []
        everything = torch.stack(list(session.key_means.values()))
        common = everything.mean(0)
        asked = self._question_vector(session, question) - common
        stacked = torch.stack(list(vectors.values())) - common
        scores = torch.nn.functional.cosine_similarity(stacked, asked[None]).tolist()
        ranked = sorted(zip(scores, vectors, strict=True), key=lambda pair: (-pair[0], pair[1]))
        return sorted(turn for score, turn in ranked[:num] if score >= min_score)

    def learn(self, session: Session, turns: list[int]) -> None:
        """Keep the vectors of turns whose KV is at hand."""
        for turn in turns:
            self._turn_vector(session, turn)

    def _turn_vector(self, session: Session, turn: int) -> Tensor | None:
        """Kept with the session, so that a turn's KV is read for it once."""
        if turn not in session.key_means:
            kv = self._tiers.load(session, turn)
            if kv is None:
                return None
            session.key_means[turn] = self._mean_key(kv)
        return session.key_means[turn]

    def _question_vector(self, session: Session, question: list[int]) -> Tensor:
        runner = self._runner = self._runner or self._make_runner()
        token_ids = [*session.context.token_ids, *question][-_MAX_TOKENS:]
        context = Context(token_ids)
        runner.pool.reserve(context, len(token_ids))
        runner.run([Chunk(context=context, num_tokens=len(token_ids), needs_sampling=True)])
        start = max(0, len(token_ids) - len(question))
        vector = self._mean_key(runner.pool.read(context, start, len(token_ids)))
        runner.pool.release(context)
        return vector

    def _mean_key(self, kv: Tensor) -> Tensor:
        """float32 (num_kv_heads * head_dim,) of KV (2, num_layers, num_tokens, num_kv_heads, head_dim)."""
        return kv[0, kv.shape[1] // 2].float().mean(0).flatten()

    def _make_runner(self) -> ModelRunner:
        assert isinstance(self._model_runner, ModelRunner), "other runners have no sessions"
        model = self._model_runner.model
        pool = BlockPool(
            model.config,
            num_blocks=-(-_MAX_TOKENS // self._pool.block_size),
            block_size=self._pool.block_size,
            dtype=self._pool.dtype,
            device=self._pool.device,
        )
        return ModelRunner(model, pool, max_num_seqs=1, max_context=_MAX_TOKENS)
