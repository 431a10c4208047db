"""Whether a model answers from recalled KV about as well as from recalled text: measured on its own weights.

A fixed conversation is computed; its first turn leaves, and is put back before a question in both ways.
The model then reads the answer. Recalled KV was computed in another place, beside other neighbours: that
may change the prediction a little. Where it garbles it, recall as KV is not to be used for this model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
from torch import Tensor

from dayshift.engine.api import Message
from dayshift.engine.block_pool import Chunk, Context
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.scoring import score_next
from dayshift.engine.sessions import codecs
from dayshift.engine.tokenizer import Tokenizer

_SYSTEM = "You lead a robot through shifts of jobs, and remember what was done."
_PAST = (
    ("Shift 1, job 1, step 1: open the middle drawer of the cabinet. Result: done.", "Next is step 2."),
    ("Shift 1, job 1, step 2: put the wine bottle on the rack. Result: failed twice.", "Step 2 is given up."),
    ("Shift 2, job 1, step 1: turn on the stove. Result: done.", "Next is step 2."),
    ("Shift 2, job 1, step 2: push the plate to the front of the stove. Result: done.", "Job 1 is over."),
)
_NUM_RECALLED = 2  # the first shift's turns
_QUESTION = "Review of shift 1: which step was given up, and what was it about?"
_ANSWER = (
    "Step 2 of job 1 was given up: put the wine bottle on the rack. It failed twice. Step 1, open the middle "
    "drawer of the cabinet, was done."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallGap:
    """How the answer is predicted after recall as KV, as text, and after none: nats for each token."""

    kl_kv: float  # of the predictions after recall as KV, to those as text
    kl_none: float
    nll_text: float  # of the answer
    nll_kv: float
    nll_none: float


def probe_id() -> str:
    """Names the conversation: what was measured on another one does not count."""
    return sha256(repr((_SYSTEM, _PAST, _NUM_RECALLED, _QUESTION, _ANSWER)).encode()).hexdigest()[:8]


def measure_recall_gap(runner: ModelRunner, tokenizer: Tokenizer, codec: str) -> RecallGap:
    """Compare the ways to recall, on the probe, in a small pool of its own; KV at rest is `codec`'s."""
    system = tokenizer.encode(tokenizer.render_system(_SYSTEM))
    turns = [
        tokenizer.encode(tokenizer.render_past_turn((Message("user", user), Message("assistant", reply))))
        for user, reply in _PAST
    ]
    recalled = [token_id for turn in turns[:_NUM_RECALLED] for token_id in turn]
    recent = [token_id for turn in turns[_NUM_RECALLED:] for token_id in turn]
    question = tokenizer.encode(tokenizer.render_turn((Message("user", _QUESTION),)))
    answer = tokenizer.encode(_ANSWER)
    probe = _Probe(runner, num_tokens=sum(map(len, (system, recalled, recent, question, answer))))

    in_order = probe.begin()
    probe.compute(in_order, [*system, *recalled, *recent])
    kv = probe.pool.read(in_order, 0, in_order.num_computed)
    probe.pool.release(in_order)
    num_system, num_kept = len(system), len(system) + len(recalled)
    window = torch.cat((kv[:, :, :num_system], kv[:, :, num_kept:]), dim=2)
    piece = codecs.encode(codec, kv[:, :, num_system:num_kept].contiguous())
    archived = codecs.decode(piece, dtype=kv.dtype, device=kv.device)

    def after(put_back: Callable[[Context], None]) -> Tensor:
        context = probe.begin()
        probe.write(context, [*system, *recent], window)
        put_back(context)
        probe.compute(context, question)
        return probe.predict(context, answer)

    as_text = after(lambda context: probe.compute(context, recalled))
    as_kv = after(lambda context: probe.write(context, recalled, archived))
    none = after(lambda context: None)
    expected = torch.tensor(answer[1:], device=as_text.device)
    return RecallGap(
        kl_kv=_kl(as_text, as_kv),
        kl_none=_kl(as_text, none),
        nll_text=_nll(as_text, expected),
        nll_kv=_nll(as_kv, expected),
        nll_none=_nll(none, expected),
    )


class _Probe:
    """One small context at a time."""

    def __init__(self, runner: ModelRunner, *, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._runner = runner.with_small_pool(num_tokens)
        self.pool = self._runner.pool

    def begin(self) -> Context:
        context = Context()
        self.pool.reserve(context, self._num_tokens)
        return context

    def compute(self, context: Context, token_ids: Sequence[int]) -> None:
        context.token_ids += token_ids
        self._runner.run([Chunk(context=context, num_tokens=len(token_ids), needs_sampling=False)])

    def write(self, context: Context, token_ids: Sequence[int], kv: Tensor) -> None:
        self.pool.write(context, context.num_computed, kv)
        context.token_ids += token_ids
        context.num_computed += len(token_ids)

    def predict(self, context: Context, token_ids: Sequence[int]) -> Tensor:
        """Log probabilities (len(token_ids) - 1, vocab_size), float64, of all tokens but the first; the
        context is given back."""
        context.token_ids += token_ids
        log_probs = score_next(self._runner, context, len(token_ids))[:-1].double()
        self.pool.release(context)
        return log_probs


def _kl(expected: Tensor, got: Tensor) -> float:
    return (expected.exp() * (expected - got)).sum(-1).mean().item()


def _nll(log_probs: Tensor, expected: Tensor) -> float:
    return -log_probs.gather(1, expected[:, None]).mean().item()
