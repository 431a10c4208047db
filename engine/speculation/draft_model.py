"""Drafts from a small decoder with the model's vocabulary, in the same process.

It has a KV pool and a runner of its own, and a context of its own for each context that it drafts for,
which it follows by comparing tokens: those that both begin with keep their keys, all others are computed
again. So it needs no word of recall, compaction, parking or dropped drafts. What it does not see (the past of
a long context, a context for which it has no room) makes its drafts worse or fewer, never an output wrong.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from dayshift.engine import kernels
from dayshift.engine.backend import device_of, dtype_of
from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.config import EngineConfig
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.folder import resolve_model
from dayshift.engine.models.formats import fallback_reason, load_model_config
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.speculation.gate import MAX_DRAFTS
from dayshift.engine.startup import phase
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError

_MAX_BEHIND = MAX_DRAFTS + 1  # tokens of a context that are computed with its first draft; more, before
_MIN_TOKENS = 64  # of the pool
_CPU_KV_BYTES = 256 << 20
_GPU_MEMORY_SHARE = 0.1  # of what is free before the model is loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """Drafts for each of some contexts, and what they took."""

    token_ids: list[tuple[int, ...]]
    num_drafted_for: int  # contexts that got some, all at once
    rounds_s: float
    num_context_tokens: int  # computed before, of contexts that the draft model did not know
    contexts_s: float


class DraftModel:
    """Says what may follow a context. `vocab_size`: ids from there on are no tokens of the model;
    `max_step_tokens`: tokens of contexts that are computed in a step at most."""

    def __init__(self, runner: ModelRunner, *, vocab_size: int, max_step_tokens: int) -> None:
        self.runner, self.pool = runner, runner.pool
        self._vocab_size = min(vocab_size, runner.model.config.vocab_size)
        self._has_all_ids = self._vocab_size == vocab_size
        self._max_step_tokens = max_step_tokens
        capacity = self.pool.num_blocks * self.pool.block_size
        self._max_context = min(runner.model.config.max_positions, capacity)
        self._own: OrderedDict[Context, Context] = OrderedDict()  # by the model's; oldest use first

    def propose(self, contexts: Seq[Context], num_rounds: int) -> Proposals:
        """The `num_rounds` most likely tokens behind each context, one after the other; none where the pool
        has no room beside the other contexts, or where more is to be computed before than a step may."""
        for context in contexts:
            if context in self._own:
                self._own.move_to_end(context)
        current = set(contexts)
        followed = [self._follow(context, current) for context in contexts]
        began_at = time.monotonic()
        num_context_tokens = self._catch_up([own for own in followed if own is not None])
        caught_up_at = time.monotonic()
        ready = [own for own in followed if own is not None and _num_behind(own) <= _MAX_BEHIND]
        drafts = dict(zip(ready, self._draft(ready, num_rounds), strict=True))
        return Proposals(
            token_ids=[() if own is None else drafts.get(own, ()) for own in followed],
            num_drafted_for=len(ready),
            rounds_s=time.monotonic() - caught_up_at,
            num_context_tokens=num_context_tokens,
            contexts_s=caught_up_at - began_at,
        )

    def num_behind(self, context: Context) -> int:
        """About how many tokens of a context have to be computed before it can be drafted for."""
        own, num_tokens = self._own.get(context), min(len(context.token_ids), self._max_context)
        num_missing = num_tokens - (0 if own is None else own.num_computed)
        return num_missing if num_missing > _MAX_BEHIND else 0

    def warm_up(self) -> None:
        """Compile the kernels that drafting launches now, not in the first steps that draft."""
        context = Context(token_ids=[0] * (2 * _MAX_BEHIND))
        for _ in range(2):
            self.propose([context], MAX_DRAFTS)
        self._drop(context)

    def check(self) -> None:
        """Raise AssertionError if contexts and pool disagree."""
        self.pool.check(self._own.values())

    def _follow(self, context: Context, current: set[Context]) -> Context | None:
        """The own context with the tokens of the model's, and blocks for them and their drafts. For these the
        contexts used longest ago are dropped, but none of the `current` ones; None: that is not enough."""
        token_ids, own = self._visible(context.token_ids), self._own.setdefault(context, Context())
        num_kept = _num_common(own.token_ids[: own.num_computed], token_ids)
        own.num_computed = min(num_kept, len(token_ids) - 1)
        own.token_ids = token_ids
        num_tokens = len(token_ids) + MAX_DRAFTS
        while self.pool.num_missing(own, num_tokens) > self.pool.num_free:
            oldest = next(iter(self._own))
            if oldest in current:
                self._drop(context)
                return None
            self._drop(oldest)
        self.pool.reserve(own, num_tokens)
        return own

    def _visible(self, token_ids: list[int]) -> list[int]:
        """The end of a context that is too long. It moves on by halves, so that what was computed is of use
        for many steps."""
        half = self._max_context // 2
        num_too_many = max(0, len(token_ids) + MAX_DRAFTS - self._max_context)
        visible = token_ids[-(-num_too_many // half) * half :]
        return visible if self._has_all_ids else [min(i, self._vocab_size - 1) for i in visible]

    def _catch_up(self, followed: Seq[Context]) -> int:
        """Compute all but the last token of contexts that lack many; the number of tokens computed."""
        chunks: list[Chunk] = []
        num_left = self._max_step_tokens
        for own in followed:
            if num_left and _num_behind(own) > _MAX_BEHIND:
                num_tokens = min(num_left, _num_behind(own) - 1)
                chunks.append(Chunk(context=own, num_tokens=num_tokens, needs_sampling=False))
                num_left -= num_tokens
        if chunks:
            self.runner.run(chunks)
            if self.pool.device.type == "cuda":  # its time is taken
                torch.cuda.current_stream().synchronize()
        return self._max_step_tokens - num_left

    def _draft(self, followed: Seq[Context], num_rounds: int) -> list[tuple[int, ...]]:
        if not followed:
            return []
        logits = self.runner.run(
            [Chunk(context=own, num_tokens=_num_behind(own), needs_sampling=True) for own in followed]
        )
        drawn = [kernels.largest(logits[:, : self._vocab_size])]
        for _ in range(num_rounds - 1):
            # The tokens stay on the device: the host waits once for all of them.
            logits = self.runner.run_ahead(followed, drawn[-1]).take()
            for own in followed:
                own.num_computed += 1
            drawn.append(kernels.largest(logits[:, : self._vocab_size]))
        rows: list[list[int]] = torch.stack(drawn, dim=1).tolist()
        for own, row in zip(followed, rows, strict=True):
            own.token_ids += row
        return [tuple(row) for row in rows]

    def _drop(self, context: Context) -> None:
        self.pool.release(self._own.pop(context))


def open_draft_model(
    config: EngineConfig, model: Path, tokenizer: Tokenizer, *, max_step_tokens: int
) -> DraftModel | None:
    """Load the draft model that the configuration names; None: it names none. `tokenizer` is that of `model`.

    Raises DayshiftError for one that cannot draft for the model.
    """
    if config.draft_model is None:
        return None
    if config.speculation == "off":
        raise DayshiftError("draft_model is of no use with speculation off; leave out one of the two")
    folder, device, dtype = resolve_model(config.draft_model), device_of(config), dtype_of(config)
    if (reason := fallback_reason(model) or fallback_reason(folder)) is not None:
        raise DayshiftError(f"draft_model needs two models that run on our own decoder, {reason}")
    _check_vocabulary(config.draft_model, Tokenizer(folder), tokenizer)
    model_config = load_model_config(folder)
    with phase("weights"):
        decoder = load_decoder(
            folder,
            dtype=dtype,
            device=device,
            num_positions=model_config.max_positions,
            load_format=config.load_format,
            seed=config.seed,
        )
    num_bytes = config.draft_kv_bytes or _default_kv_bytes(device)
    num_tokens = min(
        num_bytes // model_config.kv_bytes_per_token(dtype.itemsize),
        config.max_num_seqs * model_config.max_positions,
    )
    if num_tokens < max(_MIN_TOKENS, config.block_size):
        raise DayshiftError(f"draft_kv_bytes {num_bytes} holds {num_tokens} tokens; {_MIN_TOKENS} are needed")
    pool = BlockPool(
        model_config,
        num_blocks=num_tokens // config.block_size,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
    )
    runner = ModelRunner(
        decoder,
        pool,
        max_num_seqs=config.max_num_seqs,
        max_context=min(model_config.max_positions, pool.num_blocks * pool.block_size),
    )
    vocab_size = load_model_config(model).vocab_size
    draft_model = DraftModel(runner, vocab_size=vocab_size, max_step_tokens=max_step_tokens)
    if device.type == "cuda":
        with phase("compile"):
            draft_model.warm_up()
    return draft_model


def _check_vocabulary(name: str, draft: Tokenizer, model: Tokenizer) -> None:
    """Raise DayshiftError unless the same ids are the same tokens."""
    theirs, ours = draft.vocabulary, model.vocabulary
    if theirs == ours:
        return
    num_other = sum(theirs.get(token) != token_id for token, token_id in ours.items())
    raise DayshiftError(
        f"draft model {name} has another vocabulary: {len(theirs):,} tokens, and {num_other:,} of the "
        f"model's {len(ours):,} are not the same there; give a smaller model of the same family"
    )


def _default_kv_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_MEMORY_SHARE)
    return _CPU_KV_BYTES


def _num_behind(own: Context) -> int:
    return len(own.token_ids) - own.num_computed


def _num_common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with."""
    num = min(len(first), len(second))
    if first[:num] == second[:num]:
        return num
    return next(i for i in range(num) if first[i] != second[i])
