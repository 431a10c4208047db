"""How well the model predicts tokens that are known: logits after each of them, not only the last."""

from __future__ import annotations

import torch
from torch import Tensor

from dayshift.engine.block_pool import Chunk, Context
from dayshift.engine.model_runner import ModelRunner


@torch.inference_mode()
def score_next(runner: ModelRunner, context: Context, num_tokens: int) -> Tensor:
    """Compute the next `num_tokens` tokens of a context, and mark them as computed.

    Returns float32 (num_tokens, vocab_size): after each of them, the log probabilities of what follows.
    """
    start, end = context.num_computed, context.num_computed + num_tokens
    known = tuple(context.token_ids[start + 1 : end])  # as drafts, each has logits
    chunk = Chunk(context=context, num_tokens=1, needs_sampling=True, draft_ids=known)
    logits = runner.run([chunk])
    context.num_computed = end
    return logits.float().log_softmax(-1)
