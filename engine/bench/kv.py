"""What each codec of KV at rest costs and saves: `dayshift bench kv`.

A session's KV is parked and restored through its archive with each codec; then the tokens that really
followed are fed to it one by one. KL compares the distributions of the next token with those of
the session that was never parked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dayshift.engine.api import Message, RecallMode, SessionConfig
from dayshift.engine.block_pool import Chunk
from dayshift.engine.engine import Engine
from dayshift.engine.quant.kv import dequantize_kv, quantize_kv, values_dtype
from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.context_builder import ContextBuilder
from dayshift.engine.sessions.host_pool import HostPool
from dayshift.engine.sessions.kv_tiers import KVTiers
from dayshift.engine.sessions.layout import CallPlan
from dayshift.engine.sessions.record_format import KV_CODECS
from dayshift.engine.sessions.session import Session
from dayshift.types import DayshiftError

_MIN_TIMED_S = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """One line of the table: a codec of KV at rest, or a pool of quantised rows.

    Speeds count the KV as bfloat16, on the pool's device.
    """

    codec: str
    bytes_per_token: float
    ratio: float  # to bfloat16
    mean_kl: float  # nats, to the session that was never parked
    p95_kl: float
    same_top_token: float  # share of the places where the most likely token is the same
    encode_gb_per_s: float
    decode_gb_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A conversation: turns that are parked, and turns that follow, of which `num_tokens` are read."""

    system: str
    past: Sequence[tuple[Message, ...]]
    future: Sequence[tuple[Message, ...]]
    num_tokens: int


def compare_codecs(engine: Engine, transcript: Transcript) -> Iterator[CodecRow]:
    """A row for each codec: the past is parked and restored with it, then the model reads the future."""
    exact = _Reading(engine, transcript)
    expected = exact.read_future()
    kv = engine.pool.read(exact.session.context, 0, exact.num_past)
    exact.close()
    for name in KV_CODECS:
        reading = _Reading(engine, transcript)
        reading.park_and_restore(name)
        got = reading.read_future()
        reading.close()
        piece = codecs.encode(name, kv)
        yield _row(
            name,
            num_bytes=piece.data.nbytes,
            kv=kv,
            log_probs=(expected, got),
            encode=lambda name=name: codecs.encode(name, kv),
            decode=lambda piece=piece: codecs.decode(piece, dtype=kv.dtype, device=kv.device),
        )


def compare_pool(engine: Engine, quantized: Engine, transcript: Transcript) -> CodecRow:
    """The row of KV that is quantised in use: `quantized` computes all of the transcript on its pool."""
    exact, reading = _Reading(engine, transcript), _Reading(quantized, transcript)
    expected, got = exact.read_future(), reading.read_future()
    kv = engine.pool.read(exact.session.context, 0, exact.num_past)
    exact.close()
    reading.close()
    dtype = values_dtype(quantized.pool.kv)
    values, scales = quantize_kv(kv, dtype)
    return _row(
        f"{quantized.config.kv_cache_dtype} in use",
        num_bytes=values.nbytes + scales.nbytes,
        kv=kv,
        log_probs=(expected, got),
        encode=lambda: quantize_kv(kv, dtype),
        decode=lambda: dequantize_kv(values, scales),
    )


class _Reading:
    """A session whose past is computed, and the tokens that follow."""

    def __init__(self, engine: Engine, transcript: Transcript) -> None:
        self._engine = engine
        window = engine.max_context // 2
        history = tuple((float(at), messages) for at, messages in enumerate(transcript.past))
        info = engine.open_session(SessionConfig(system=transcript.system, window=window, history=history))
        self.session: Session = engine.session_manager.get(info.session_id)
        if len(self.session.entries) < len(transcript.past):
            raise DayshiftError(f"the transcript does not fit into a window of {window} tokens")
        tokenizer = engine.tokenizer
        self._future = [
            token_id
            for messages in transcript.future
            for token_id in tokenizer.encode(tokenizer.render_past_turn(messages))
        ][: transcript.num_tokens]
        self.num_past = len(self.session.context.token_ids)
        engine.pool.reserve(self.session.context, self.num_past + len(self._future))
        self._compute(self.num_past)

    def park_and_restore(self, codec: str) -> None:
        pool = self._engine.pool
        no_host = HostPool(num_bytes=0, block_bytes=1, device=pool.device)  # all goes to the archive
        builder = ContextBuilder(
            pool, KVTiers(pool, no_host, codec), None, lambda _: False, lambda: self.num_past
        )
        builder.park(self.session)
        plan = CallPlan(entries=self.session.entries)
        num_extra = len(self._future)
        counts = builder.build(self.session, plan, RecallMode.KV, num_new=num_extra, num_extra=num_extra)
        if counts.restored != self.num_past:
            raise DayshiftError(f"{codec}: {counts.restored} of {self.num_past} tokens were restored")

    def read_future(self) -> Tensor:
        """Log probabilities (len(future), vocab_size), float64, before each token of the future."""
        logits: list[Tensor] = []
        for token_id in self._future:
            self.session.context.token_ids.append(token_id)
            logits.append(self._compute(1))
        return torch.cat(logits).double().log_softmax(-1)

    def close(self) -> None:
        self._engine.close_session(self.session.session_id)

    def _compute(self, num_tokens: int) -> Tensor:
        chunk = Chunk(context=self.session.context, num_tokens=num_tokens, needs_sampling=True)
        return self._engine.runner.run([chunk]).clone()


def _row(
    codec: str,
    *,
    num_bytes: int,
    kv: Tensor,
    log_probs: tuple[Tensor, Tensor],
    encode: Callable[[], object],
    decode: Callable[[], object],
) -> CodecRow:
    expected, got = log_probs
    kl = (expected.exp() * (expected - got)).sum(-1).clamp_min(0)
    bfloat16_bytes = 2 * kv.numel()
    return CodecRow(
        codec=codec,
        bytes_per_token=num_bytes / kv.shape[2],
        ratio=bfloat16_bytes / num_bytes,
        mean_kl=kl.mean().item(),
        p95_kl=kl.quantile(0.95).item(),
        same_top_token=(expected.argmax(-1) == got.argmax(-1)).double().mean().item(),
        encode_gb_per_s=bfloat16_bytes / 1e9 / _seconds(encode),
        decode_gb_per_s=bfloat16_bytes / 1e9 / _seconds(decode),
    )


def _seconds(run: Callable[[], object]) -> float:
    """Time of one run: the best of those that fit into `_MIN_TIMED_S`, at least three."""
    best, spent, num_runs = float("inf"), 0.0, 0
    while spent < _MIN_TIMED_S or num_runs < 3:
        started = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
        best, spent, num_runs = min(best, elapsed), spent + elapsed, num_runs + 1
    return best
