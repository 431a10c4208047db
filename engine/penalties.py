"""Presence, frequency and repetition penalties, and logit bias, on tensors of the batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from dayshift.engine.api import SamplingParams


class Penalties:
    """What one request's penalties depend on. Its tensors are made at the first step.

    The counts stay on the device: a step reads none of them back.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.prompt_token_ids: tuple[int, ...] = ()
        self._state: _State | None = None

    @staticmethod
    def are_wanted(params: SamplingParams) -> bool:
        """Whether a request asks for any."""
        return bool(
            params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1
            or params.logit_bias
        )

    def state(self, vocab_size: int, device: torch.device) -> _State:
        """The request's tensors."""
        if self._state is None:
            self._state = _State(self.params, self.prompt_token_ids, vocab_size, device)
        return self._state

    def count(self, token_id: torch.Tensor | int) -> None:
        """A token was chosen: () int64, on the logits' device, or a number."""
        assert self._state is not None, "its logits were penalised before"
        self._state.num_generated[token_id] += 1

    def after(self, token_ids: Sequence[int]) -> Penalties:
        """The penalties if these tokens followed; this object stays as it is."""
        assert self._state is not None, "the first token is never a draft"
        later = copy.copy(self)
        later._state = copy.copy(self._state)
        later._state.num_generated = self._state.num_generated.clone()
        for token_id in token_ids:
            later.count(token_id)
        return later


class _State:
    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], vocab_size: int, device: torch.device
    ) -> None:
        self.num_generated = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.is_in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self.bias = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        if params.logit_bias:
            token_ids, values = zip(*params.logit_bias, strict=True)
            index = torch.tensor(token_ids, dtype=torch.int64, device=device)
            self.bias.index_add_(0, index, torch.tensor(values, dtype=torch.float32, device=device))


def penalise(logits: torch.Tensor, rows: Sequence[Penalties]) -> torch.Tensor:
    """Apply each row's penalties as `SamplingParams` defines them.

    Args:
        logits: (num_rows, vocab_size) float32, left unchanged.
        rows: the request of each row.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=logits.dtype, device=logits.device).unsqueeze(1)

    states = [row.state(logits.shape[1], logits.device) for row in rows]
    counts = torch.stack([state.num_generated for state in states])
    is_generated = counts > 0
    is_repeated = is_generated | torch.stack([state.is_in_prompt for state in states])
    factor = column([row.params.repetition_penalty for row in rows])
    scaled = torch.where(logits > 0, logits / factor, logits * factor)
    penalty = column([row.params.presence_penalty for row in rows]) * is_generated
    penalty += column([row.params.frequency_penalty for row in rows]) * counts
    bias = torch.stack([state.bias for state in states])
    return torch.where(is_repeated, scaled, logits) - penalty + bias
