"""Time to first token, decode steps, and decoding beside a long prompt, for any `Target`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from dayshift.engine.bench.targets import Load, Reply, Target

WARM_UP_TOKENS = 2048 + 8  # of the longest request that is not measured
_DECODE_TOKENS = 96
_PREFILL_BESIDE_DECODES = 512 - 128  # prompt tokens that come into a step with decodes, at the least
_BESIDE_CONTEXT, _BESIDE_TOKENS, _BESIDE_AFTER = 256, 400, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The median of a cell's repeats, and all of them, in milliseconds."""

    cell: str  # as in benchmarks/h200.json: "133" (prompt), "8@2048" (batch @ context)
    median_ms: float
    all_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Milliseconds between the tokens of running decoders, alone and while a long prompt comes in."""

    num_decoders: int
    prompt: int
    alone_p50_ms: float
    alone_p99_ms: float
    beside_p99_ms: float
    prompt_ttft_ms: float

    @property
    def ratio(self) -> float:
        return self.beside_p99_ms / self.alone_p99_ms


class Prompts:
    """Random prompts, none of which repeats another, so that no cache of prefixes helps."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._random = vocab_size, Random(seed)

    def make(self, length: int) -> list[int]:
        """Token ids from the middle of the vocabulary: special tokens are at its ends."""
        edge = min(1000, self._vocab_size // 4)
        return [self._random.randrange(edge, self._vocab_size - edge) for _ in range(length)]


def warm_up(target: Target, prompts: Prompts) -> None:
    """Requests that are not measured."""
    for length in (133, WARM_UP_TOKENS - 8):
        target.run([Load(prompt=prompts.make(length), num_tokens=8)])


def measure_ttft(
    target: Target, prompts: Prompts, lengths: Sequence[int], repeats: int
) -> Iterator[Measured]:
    """Time to first token of one fresh prompt at a time."""
    for length in lengths:
        times = tuple(
            target.run([Load(prompt=prompts.make(length), num_tokens=1)])[0].ttft_ms for _ in range(repeats)
        )
        yield Measured(cell=str(length), median_ms=statistics.median(times), all_ms=times)


def measure_decode(
    target: Target,
    prompts: Prompts,
    cells: Sequence[tuple[int, int]],
    repeats: int,
    temperature: float = 0.0,
    num_tokens: int = _DECODE_TOKENS,
) -> Iterator[Measured]:
    """Milliseconds of a decode step for (batch, context) cells, counted while all sequences decode.

    Several sequences have `context` tokens in the mean of that time: the first of them decode while the last
    are still prefilled, hundreds of tokens where a server takes little of a prompt into a step. So a run that
    is not counted tells how many tokens come before, and prompts are shorter by them.

    A temperature above 0 spreads the tokens, and with them the experts of a random mixture model.
    """
    for batch, context in cells:
        # The first sequence to start goes on decoding while the last is still prefilled, a step for
        # every so many tokens.
        length = num_tokens + batch * context // _PREFILL_BESIDE_DECODES

        def decode(size: int, batch: int = batch, length: int = length) -> list[Reply]:
            loads = [
                Load(prompt=prompts.make(size), num_tokens=length, temperature=temperature)
                for _ in range(batch)
            ]
            return target.run(loads)

        size = context if batch == 1 else max(1, context - round(mean_generated(decode(context))))
        times = tuple(step_ms(decode(size)) for _ in range(repeats))
        yield Measured(cell=f"{batch}@{context}", median_ms=statistics.median(times), all_ms=times)


def mean_generated(replies: Sequence[Reply]) -> float:
    """Tokens that a reply has got, in the mean of all replies and of the time in which all are decoded."""
    start, end = _all_decode(replies)
    return statistics.fmean((_count_at(reply, start) + _count_at(reply, end)) / 2 for reply in replies)


def _count_at(reply: Reply, seconds: float) -> int:
    """Tokens of a reply that had come by then."""
    return max((count for at, count in reply.marks if at <= seconds), default=0)


def step_ms(replies: Sequence[Reply]) -> float:
    """Milliseconds of a step, while every reply was being decoded."""
    start, end = _all_decode(replies)
    num_tokens = sum(
        after[1] - before[1]
        for reply in replies
        for before, after in pairwise(reply.marks)
        if before[0] >= start and after[0] <= end
    )
    return (end - start) * 1e3 / (num_tokens / len(replies)) if num_tokens else float("nan")


def _all_decode(replies: Sequence[Reply]) -> tuple[float, float]:
    """When the last reply began, and when the first one ended."""
    return max(reply.marks[0][0] for reply in replies), min(reply.marks[-1][0] for reply in replies)


def measure_beside(target: Target, prompts: Prompts, num_decoders: int, prompt: int) -> Beside:
    """Let `num_decoders` sequences decode, and send a long prompt into the middle of it."""
    decoders = [
        Load(prompt=prompts.make(_BESIDE_CONTEXT), num_tokens=_BESIDE_TOKENS) for _ in range(num_decoders)
    ]
    late = Load(prompt=prompts.make(prompt), num_tokens=1, after=_BESIDE_AFTER)
    *running, arrived = target.run([*decoders, late])
    start, end = arrived.sent_at, arrived.marks[0][0]
    began = max(reply.marks[0][0] for reply in running)
    alone, beside = [], []
    for reply in running:
        for before, after in pairwise(reply.marks):
            gap = (after[0] - before[0]) * 1e3 / (after[1] - before[1])
            if after[0] >= start and before[0] <= end:
                beside.append(gap)
            elif before[0] >= began and after[0] < start:
                alone.append(gap)
    return Beside(
        num_decoders=num_decoders,
        prompt=prompt,
        alone_p50_ms=statistics.median(alone),
        alone_p99_ms=percentile(alone, 99),
        beside_p99_ms=percentile(beside, 99),
        prompt_ttft_ms=arrived.ttft_ms,
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, -(-len(ordered) * percent // 100) - 1)]
