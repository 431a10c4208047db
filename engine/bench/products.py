"""Which of cuBLASLt's tiles is the fastest for each product of a prompt, for `tuned_linear`'s table.

Tiles are timed in an order that is drawn anew for each round: a GPU that its power bounds is slower after
work that took much of it, and a fixed order would give one tile the time that another one has saved.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from dayshift.engine.bench.kernels import Shape
from dayshift.engine.kernels.cublas_lt import Algorithm, Configured, Product
from dayshift.engine.kernels.launch import num_processors
from dayshift.engine.kernels.tuned_linear import Tables, Tuned

# Numbers of tokens to time: close to each other where tiles are few for each processor.
SIZES = (
    *(112, 128, 160, 192, 224),
    *range(256, 4097, 64),
    *(5120, 6656, 8960, 13_056, 18_048, 27_008),
)
_LONG = 4096  # beyond it one round less tells as much
_SHORT = 1024  # up to it products take less time than their launches
_AHEAD_CYCLES = 4_000_000  # of the GPU, in which the host launches a round of them
_LEAST_GAIN = 0.01  # less is noise
_NUM_FINALISTS = 5
_FINAL_ROUNDS = 6
_CACHE_BYTES = 256 << 20  # more than any GPU's last cache

# cublasLt.h: stages of 64 columns, as many as fit; clusters of two tiles of weights or of tokens, or none.
_STAGES = 35
_TWO_WEIGHTS, _TWO_TOKENS, _ALONE = 3, 5, 2

# cublasLtMatmulTile_t: of 128 and 256 rows of the weight by tokens, and of rows by 128 tokens.
_OF_128_ROWS = dict(
    zip(
        range(128, 353, 8),
        (
            20,
            405,
            406,
            407,
            29,
            408,
            409,
            410,
            32,
            *range(411, 418),
            23,
            *range(418, 425),
            176,
            *range(425, 429),
        ),
        strict=True,
    )
)
_OF_256_ROWS = dict(
    zip(range(96, 177, 8), (495, 496, 497, 498, 24, 499, 500, 501, 502, 503, 504), strict=True)
)
_OF_128_TOKENS = {136: 179, 144: 184, 152: 189, 160: 30, 168: 197, 176: 201, 192: 31, 320: 248}
_MOST_SMALL = 176
# Rows and tokens by number. Two groups of warps have a small tile each, or share a larger one.
_SMALL_TILES = {
    **{number: (128, tokens) for tokens, number in _OF_128_ROWS.items() if tokens <= _MOST_SMALL},
    **{number: (rows, 128) for rows, number in _OF_128_TOKENS.items() if rows <= _MOST_SMALL},
}
_SHARED_TILES = {
    **{number: (128, tokens) for tokens, number in _OF_128_ROWS.items() if tokens > _MOST_SMALL},
    **{number: (256, tokens) for tokens, number in _OF_256_ROWS.items()},
    **{number: (rows, 128) for rows, number in _OF_128_TOKENS.items() if rows > _MOST_SMALL},
}
_NUM_SHARED = 8  # tiles of those that fill the processors best


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """One product's times."""

    num_rows: int  # of the weight
    size: int
    num_tokens: int
    cublas_us: float  # by the algorithm that cuBLAS chooses
    tuned_us: float
    algorithm: Algorithm | None  # None: cuBLAS's own


def weights_of(shape: Shape) -> list[tuple[int, int]]:
    """(num_rows, size) of a decoder's dense layers, the head aside."""
    attention = [(shape.qkv, shape.hidden), (shape.hidden, shape.num_heads * shape.head_dim)]
    mlp = [] if shape.num_experts else [(2 * shape.inner, shape.hidden), (shape.hidden, shape.inner)]
    return attention + mlp


def tune(weights: Iterable[tuple[int, int]], sizes: Sequence[int] = SIZES) -> Iterator[ProductRow]:
    """The fastest algorithm of each product on the current CUDA device, of those with cuBLAS's own bits;
    where there are none, cuBLAS's own."""
    device = torch.device("cuda", torch.cuda.current_device())
    for num_rows, size in weights:
        product = Product(num_rows, size, device)
        num_copies = max(2, _CACHE_BYTES // (2 * num_rows * size))
        copies = [_randn(num_rows, size) * 0.02 for _ in range(num_copies)]
        for num_tokens in sizes:
            yield _tune_product(product, copies, _randn(num_tokens, size))


def as_tables(rows: Iterable[ProductRow]) -> Tables:
    """The table that `tuned_linear` reads."""
    entries: dict[tuple[int, int], list[Tuned]] = {}
    for row in sorted(rows, key=lambda row: row.num_tokens):
        has_gained = row.tuned_us < (1 - _LEAST_GAIN) * row.cublas_us
        entry = Tuned(row.num_tokens, row.algorithm if has_gained else None)
        entries.setdefault((row.num_rows, row.size), []).append(entry)
    return {weight: tuple(found) for weight, found in entries.items()}


def candidates(num_rows: int, num_tokens: int, processors: int) -> list[Algorithm]:
    """Algorithms worth timing beside those that the library suggests."""

    def taken(tile: int) -> int:
        """Outputs that there would be time for until the last processor has ended."""
        rows, tokens = _SHARED_TILES[tile]
        num_tiles = -(-num_rows // rows) * -(-num_tokens // tokens)
        return -(-num_tiles // processors) * rows * tokens

    small = [
        Algorithm(tile, _STAGES, cluster, swizzle=0, custom=custom)
        for tile, (rows, _) in _SMALL_TILES.items()
        for cluster, custom in ([(_TWO_WEIGHTS, 1)] if rows == 128 else [(_TWO_WEIGHTS, 0), (_TWO_TOKENS, 2)])
    ]
    shared = [
        Algorithm(tile, _STAGES, cluster, swizzle, custom)
        for tile in sorted(_SHARED_TILES, key=taken)[:_NUM_SHARED]
        for cluster, swizzle, custom in ((_TWO_WEIGHTS, 1, 5), (_TWO_TOKENS, 1, 7), (_ALONE, 0, 7))
    ]
    return small + shared


def _tune_product(product: Product, weights: list[Tensor], x: Tensor) -> ProductRow:
    num_tokens, y = len(x), x.new_empty(len(x), product.num_rows)
    ahead_cycles = _AHEAD_CYCLES if num_tokens <= _SHORT else 0
    finalists = _finalists(product, weights, x, y, ahead_cycles)
    copies = cycle(weights)
    launches: dict[Algorithm | None, Callable[[], object]] = {None: lambda: F.linear(x, next(copies))}
    launches |= _launches(product, finalists, weights, x, y)
    times = time_shuffled(launches, _FINAL_ROUNDS, ahead_cycles)
    best = min(finalists, key=times.__getitem__, default=None)
    return ProductRow(
        num_rows=product.num_rows,
        size=product.size,
        num_tokens=num_tokens,
        cublas_us=times[None],
        tuned_us=times[best],
        algorithm=best,
    )


def _finalists(
    product: Product, weights: list[Tensor], x: Tensor, y: Tensor, ahead_cycles: int
) -> dict[Algorithm, Configured]:
    """The fastest few of the algorithms that have cuBLAS's own bits."""
    found = product.suggested(len(x))
    if not found:
        return {}
    base = next(iter(found.values()))
    for algorithm in candidates(product.num_rows, len(x), num_processors(x.device)):
        configured = product.changed(base, algorithm, len(x))
        if configured is not None:
            found.setdefault(algorithm, configured)
    num_rounds = 3 if len(x) <= _LONG else 2
    times = time_shuffled(_launches(product, found, weights, x, y), num_rounds, ahead_cycles)
    expected = F.linear(x, weights[0])
    finalists: dict[Algorithm, Configured] = {}
    for algorithm in sorted(found, key=times.__getitem__):
        product.run(found[algorithm], x, weights[0], y.zero_())
        if torch.equal(y, expected):
            finalists[algorithm] = found[algorithm]
        if len(finalists) == _NUM_FINALISTS:
            break
    return finalists


def _launches(
    product: Product, found: dict[Algorithm, Configured], weights: list[Tensor], x: Tensor, y: Tensor
) -> dict[Algorithm, Callable[[], object]]:
    copies = cycle(weights)
    return {
        algorithm: lambda configured=configured: product.run(configured, x, next(copies), y)
        for algorithm, configured in found.items()
    }


def time_shuffled[Key: Hashable](
    launches: dict[Key, Callable[[], object]], num_rounds: int, ahead_cycles: int = 0
) -> dict[Key, float]:
    """Median µs of each launch, in another order in each round. The GPU begins a round `ahead_cycles` after
    its first launch, so that it never waits for one."""
    order, generator = list(launches), random.Random(0)
    marks: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in order}
    for _ in range(num_rounds):
        generator.shuffle(order)
        if ahead_cycles:
            torch.cuda._sleep(ahead_cycles)
        for key in order:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launches[key]()
            end.record()
            marks[key].append((start, end))
    torch.cuda.synchronize()
    return {
        key: sorted(start.elapsed_time(end) for start, end in found)[(num_rounds - 1) // 2] * 1e3
        for key, found in marks.items()
    }


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
