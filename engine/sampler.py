"""From logits to tokens: penalties, grammar mask, temperature, top-k, top-p, a random stream per request.

A request's draws depend on its seed and its logits alone: not on its neighbours in the batch, nor on
the device, nor on a preemption. Each token takes one number from the request's stream: where top-k or
top-p is asked for, a uniform one at which the cumulative distribution is inverted; otherwise the key of
a race between all tokens, which needs no sorting and no sums.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dayshift.engine import kernels
from dayshift.engine.api import InvalidRequestError, SamplingParams, TokenLogprob
from dayshift.engine.grammar import GrammarMatcher
from dayshift.engine.kernels.ahead import compile_ahead
from dayshift.engine.penalties import Penalties, penalise
from dayshift.engine.side_copies import Download, upload

MAX_LOGPROBS = 20
_COLDEST, _HOTTEST = 1e-30, 1e30  # in float32; logits vanish beside the noise, or the noise beside them


class RequestSampler:
    """What sampling keeps for one request: its parameters, random stream, grammar and penalties.

    Raises InvalidRequestError for parameters out of range.
    """

    def __init__(self, params: SamplingParams, grammar: GrammarMatcher | None = None) -> None:
        check_params(params)
        self.params = params
        self.grammar = grammar
        self.penalties = Penalties(params) if Penalties.are_wanted(params) else None
        self._stream = random.Random(params.seed)
        self._returned: deque[float] = deque()

    @property
    def is_greedy(self) -> bool:
        return is_greedy(self.params)

    @property
    def needs_host(self) -> bool:
        """A draw depends on the tokens before it by way of the host, or is more than a token."""
        params = self.params
        return self.grammar is not None or self.penalties is not None or params.logprobs is not None

    def see_prompt(self, token_ids: Sequence[int]) -> None:
        """The tokens that the call came with, for the repetition penalty."""
        if self.penalties is not None:
            self.penalties.prompt_token_ids = tuple(token_ids)

    def draw(self) -> float:
        """The next number of the request's stream, uniform in [0, 1)."""
        return self._returned.popleft() if self._returned else self._stream.random()

    def give_back(self, numbers: Sequence[float]) -> None:
        """Numbers that were drawn last, in order, and not used: the next draws are these."""
        self._returned.extendleft(reversed(numbers))

    def allowed_mask(self) -> NDArray[np.int32] | None:
        """Tokens that the grammar allows, see `GrammarMatcher.allowed_mask`; None without one."""
        return None if self.grammar is None else self.grammar.allowed_mask()


class SampledRow(Protocol):
    """What the sampling of one row of logits needs: a request, or one behind some drafts of it."""

    params: SamplingParams
    penalties: Penalties | None

    def draw(self) -> float: ...

    def allowed_mask(self) -> NDArray[np.int32] | None: ...


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One chosen token per row; a log probability where the request asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]


def is_greedy(params: SamplingParams) -> bool:
    """The most likely token is always chosen."""
    return params.temperature == 0 or params.top_k == 1


def is_filtered(params: SamplingParams) -> bool:
    """A token is drawn, but not from all."""
    return not is_greedy(params) and (params.top_k > 0 or params.top_p < 1)


def check_params(params: SamplingParams) -> None:
    """Raise InvalidRequestError, naming the field and what is allowed, if one is out of range."""
    if params.json_schema is not None and params.grammar is not None:
        raise InvalidRequestError("grammar: not together with json_schema")
    allowed = {
        "max_tokens": (params.max_tokens >= 1, "at least 1"),
        "temperature": (0 <= params.temperature < math.inf, "0 (greedy) or a positive number"),
        "top_p": (0 < params.top_p <= 1, "above 0 and at most 1"),
        "top_k": (params.top_k >= 0, "0 (off) or more"),
        "logprobs": (
            params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS,
            f"from 0 to {MAX_LOGPROBS}",
        ),
        "presence_penalty": (-2 <= params.presence_penalty <= 2, "from -2 to 2"),
        "frequency_penalty": (-2 <= params.frequency_penalty <= 2, "from -2 to 2"),
        "repetition_penalty": (0 < params.repetition_penalty < math.inf, "a positive number"),
        "logit_bias": (all(-100 <= bias <= 100 for _, bias in params.logit_bias), "from -100 to 100"),
    }
    for name, (is_allowed, rule) in allowed.items():
        if not is_allowed:
            raise InvalidRequestError(f"{name}: {getattr(params, name)} is not allowed; it must be {rule}")


class Draw:
    """The chosen token of each row, on the logits' device, on its way to the host."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SampledRow], token_ids: torch.Tensor) -> None:
        self.token_ids = token_ids  # (num_rows,) int64
        self._logprobs = _logprobs(logits, token_ids, rows)
        self._download = Download(token_ids)

    def read(self) -> SampledTokens:
        """Wait for the tokens."""
        return SampledTokens(self._download.read().tolist(), self._logprobs)


def sample(logits: torch.Tensor, rows: Sequence[SampledRow]) -> Draw:
    """Choose the next token of each row.

    Penalties come first, then the grammar; the caller moves the grammar on, once the token is kept.
    Log probabilities are the model's own: before penalties, grammar, temperature, top-k and top-p.

    Args:
        logits: (num_rows, vocab_size) in the model's dtype, left unchanged, not needed after the call.
        rows: what each row is sampled for.
    """
    allowed = apply_grammars(apply_penalties(logits, rows), rows)
    token_ids = race_tokens(allowed, rows)
    filtered = [i for i, row in enumerate(rows) if is_filtered(row.params)]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        token_ids[index] = draw_filtered(allowed[index], [rows[i] for i in filtered])
    _count(token_ids, rows)
    return Draw(logits, rows, token_ids)


def sample_in_every_way(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Sample made-up rows, so that the first request finds every kernel of sampling loaded. They are compiled
    at once before."""
    compile_ahead(lambda: _sample_in_every_way(vocab_size, dtype, device))
    _sample_in_every_way(vocab_size, dtype, device)


def _sample_in_every_way(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, logprobs=1)
    filtered = replace(drawn, top_k=10, top_p=0.9)
    # A penalty anywhere in a batch makes all of its logits float32, which are other kernels.
    penalised = [replace(way, frequency_penalty=0.1) for way in (greedy, drawn)]
    for ways in ([greedy], [greedy, drawn, filtered], *([way] for way in penalised), [*penalised, filtered]):
        rows = [RequestSampler(params) for params in ways]
        for row in rows:
            row.see_prompt((0,))
        sample(torch.zeros((len(rows), vocab_size), dtype=dtype, device=device), rows).read()


def apply_penalties(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """Logits with each row's penalties and bias, float32; `logits` itself where no row has any."""
    penalised = [(i, row.penalties) for i, row in enumerate(rows) if row.penalties is not None]
    if not penalised:
        return logits
    index = torch.tensor([i for i, _ in penalised], device=logits.device)
    wide = logits.float()
    return wide.index_copy(0, index, penalise(wide[index], [penalties for _, penalties in penalised]))


def _count(token_ids: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    for token_id, row in zip(token_ids, rows, strict=True):
        if row.penalties is not None:
            row.penalties.count(token_id)


def apply_grammars(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """Logits with -inf where a row's grammar forbids the token; `logits` itself where no row has one."""
    constrained = [(i, mask) for i, row in enumerate(rows) if (mask := row.allowed_mask()) is not None]
    if not constrained:
        return logits
    masks = torch.from_numpy(np.stack([mask for _, mask in constrained]))
    index = torch.tensor([i for i, _ in constrained], device=logits.device)
    is_allowed = unpack_bitmask(masks.to(logits.device), logits.shape[1])
    return logits.index_copy(0, index, logits[index].masked_fill(~is_allowed, -torch.inf))


def unpack_bitmask(masks: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(num_rows, ceil(vocab_size / 32)) int32, lowest bit first → (num_rows, vocab_size) bool."""
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    return ((masks.unsqueeze(-1) >> bits) & 1).bool().flatten(1)[:, :vocab_size]


def race_tokens(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """(num_rows, vocab_size) → (num_rows,) int64: a draw from all tokens, see
    `kernels.reference_sampling.draw_by_race`; the largest logit where a row is greedy or filtered."""
    races = [not is_greedy(row.params) and not is_filtered(row.params) for row in rows]
    if not any(races):
        return kernels.largest(logits)
    keys, temperatures = [0] * len(rows), [0.0] * len(rows)
    for i, row in enumerate(rows):
        if races[i]:
            keys[i] = int(row.draw() * 2**53)
            temperatures[i] = min(max(row.params.temperature, _COLDEST), _HOTTEST)
    pin_memory, device = logits.is_cuda, logits.device
    return kernels.draw_by_race(
        logits,
        upload(torch.tensor(temperatures, pin_memory=pin_memory), device),
        upload(torch.tensor(keys, pin_memory=pin_memory), device),
    )


def draw_filtered(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """Draw a token per row from those it keeps: (num_rows, vocab_size) → (num_rows,) int64.

    Kept are the top_k largest logits, and of their renormalised probabilities the fewest that reach
    top_p (nucleus sampling, Holtzman et al., arXiv:1904.09751).
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    vocab_size = logits.shape[1]
    temperature = column([row.params.temperature for row in rows])
    top_k = column([row.params.top_k or vocab_size for row in rows])
    top_p = column([row.params.top_p for row in rows])
    uniform = column([row.draw() for row in rows])

    ordered, token_ids = logits.float().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device)
    # The largest logit becomes 0, so that no temperature, however low, overflows.
    scaled = (ordered - ordered[:, :1]).double() / temperature
    cumulative = scaled.masked_fill_(rank >= top_k, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
    last = (cumulative < top_p).sum(dim=-1, keepdim=True).clamp_(max=vocab_size - 1)
    choice = torch.searchsorted(cumulative, uniform * cumulative.gather(1, last), right=True)
    return token_ids.gather(1, choice.minimum(last)).squeeze(1)


def _logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[SampledRow]
) -> list[TokenLogprob | None]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    result: list[TokenLogprob | None] = [None] * len(rows)
    if not wanted:
        return result
    index = torch.tensor(wanted, device=logits.device)
    logprobs = logits[index].float().log_softmax(dim=-1)
    chosen_ids = token_ids[index]
    chosen = logprobs.gather(1, chosen_ids.unsqueeze(1)).squeeze(1).tolist()
    num_top = min(max(rows[i].params.logprobs or 0 for i in wanted), logits.shape[1])
    top_values, top_ids = (top.tolist() for top in logprobs.topk(num_top, dim=-1))
    for position, (i, token_id) in enumerate(zip(wanted, chosen_ids.tolist(), strict=True)):
        pairs = tuple(zip(top_ids[position], top_values[position], strict=True))
        result[i] = TokenLogprob(
            token_id=token_id, logprob=chosen[position], top=pairs[: rows[i].params.logprobs]
        )
    return result
