"""Triton kernels of `draw_by_race` and `largest`; their twins in `reference_sampling` specify them."""

# Triton writes compile-time constants in capitals, and a launch takes numbers where the kernel's
# parameters are annotated constexpr.
# ruff: noqa: N803
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dayshift.engine.kernels.launch import padded

_TOKENS = 4096  # of a row, for a program


def draw_by_race(logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One token per row by the exponential race, in one pass over the logits.

    Shapes and dtypes as in `reference_sampling.draw_by_race`. A row is cut into parts, whose winners meet in
    a second launch; a draw depends on nothing but its row. Source: Maddison et al., arXiv:1411.0030.
    """
    return _race(logits, temperatures, keys)


def largest(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit of each row, with many programs to a row, where torch's argmax has one.

    Shapes and dtypes as in `reference_sampling.largest`.
    """
    return _race(logits, None, None)


def _race(logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None) -> torch.Tensor:
    """Without temperatures nobody has noise."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return token_ids
    num_parts = -(-vocab_size // _TOKENS)
    scores = torch.empty((num_rows, num_parts), dtype=torch.float32, device=logits.device)
    winners = torch.empty((num_rows, num_parts), dtype=torch.int32, device=logits.device)
    _race_part[(num_parts, num_rows)](
        logits,
        temperatures,
        keys,
        scores,
        winners,
        vocab_size,
        logits.stride(0),
        DRAWS=temperatures is not None,
        TOKENS=_TOKENS,
    )
    _race_winners[(num_rows,)](
        scores, winners, token_ids, num_parts, vocab_size, PARTS_PAD=padded(num_parts), num_warps=1
    )
    return token_ids


@triton.jit
def _gumbel(key, counter):
    """Gumbel noise of four tokens for each counter, (4 * counters,), in the order of the tokens."""
    first, second, third, fourth = tl.randint4x(key, counter)
    word = tl.interleave(tl.interleave(first, third), tl.interleave(second, fourth))
    uniform = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    # The early arrivals decide: there the logarithm of 1 - u has lost the digits that its series has.
    late = -tl.log(1.0 - tl.minimum(uniform, 0.99999994))
    early = uniform * (
        1.0 + uniform * (1.0 / 2 + uniform * (1.0 / 3 + uniform * (1.0 / 4 + uniform * (1.0 / 5))))
    )
    return -tl.log(tl.where(uniform < 1.0 / 64, early, late))


@triton.jit
def _race_part(
    logits_ptr,
    temperatures_ptr,
    keys_ptr,
    scores_ptr,
    winners_ptr,
    vocab_size,
    row_stride,
    DRAWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The best score of TOKENS tokens of one row, and the first token that has it."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * TOKENS + tl.arange(0, TOKENS)
    is_token = token < vocab_size
    score = tl.load(logits_ptr + row * row_stride + token, mask=is_token, other=float("-inf"))
    score = score.to(tl.float32)
    if DRAWS:
        temperature = tl.load(temperatures_ptr + row)
        if temperature > 0.0:
            counter = part * (TOKENS // 4) + tl.arange(0, TOKENS // 4)
            score += temperature * _gumbel(tl.load(keys_ptr + row), counter)
    best = tl.max(score, axis=0)
    place = row * tl.num_programs(0) + part
    tl.store(scores_ptr + place, best)
    tl.store(winners_ptr + place, tl.min(tl.where(score == best, token, vocab_size), axis=0))


@triton.jit
def _race_winners(scores_ptr, winners_ptr, token_ids_ptr, num_parts, vocab_size, PARTS_PAD: tl.constexpr):
    """The winner of the program's row among those of its parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PAD)
    is_part = part < num_parts
    score = tl.load(scores_ptr + row * num_parts + part, mask=is_part, other=float("-inf"))
    winner = tl.load(winners_ptr + row * num_parts + part, mask=is_part, other=vocab_size)
    first = tl.min(tl.where(score == tl.max(score, axis=0), winner, vocab_size), axis=0)
    # Of logits that are not numbers none is the best: the last token then, not one beyond it.
    tl.store(token_ids_ptr + row, tl.minimum(first, vocab_size - 1).to(tl.int64))
