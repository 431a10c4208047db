"""How well the model predicts tokens that are known: logits after each of them, not only the last."""

from __future__ import annotations

import torch
from torch import Tensor

from dayshift.engine.block_pool import Context
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.decoder import AttentionBatch


@torch.inference_mode()
def score_next(runner: ModelRunner, context: Context, num_tokens: int) -> Tensor:
    """Compute the next `num_tokens` tokens of a context, and mark them as computed.

    Returns float32 (num_tokens, vocab_size): after each of them, the log probabilities of what follows.
    """
    start, end = context.num_computed, context.num_computed + num_tokens
    device = runner.device

    def ints(values: list[int] | range, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    batch = AttentionBatch(
        positions=ints(range(start, end)),
        slot_mapping=ints(runner.pool.slots(context, start, end), torch.int64),
        block_tables=ints(context.block_table)[None],
        seq_lens=ints([end]),
        query_start=ints([0, num_tokens]),
        prompt_lengths=(num_tokens,) if start == 0 else None,
    )
    hidden = runner.model(ints(context.token_ids[start:end], torch.int64), batch, runner.pool.kv)
    context.num_computed = end
    return runner.model.logits(hidden).log_softmax(-1)
