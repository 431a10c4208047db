"""Linear layers of prompts by the tiles that were fastest when they were timed, where a table has some.

cuBLAS chooses a tile by a model. Another of its tiles was mostly 3 to 7 % faster on an H200, one that fills
the processors evenly or a small one; whole prompts of Llama-3.1-8B gained 3 % at 598 tokens, 5 % at 2,340 and
1 % at 8,892. The table names a GPU and a version of cuBLASLt, and `dayshift bench kernels --tune-products
FILE` makes one. Everything else goes to `F.linear`, whose bits are the same.
"""

from __future__ import annotations

import functools
import json
import logging
from bisect import bisect_left
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from dayshift.engine.kernels import cublas_lt
from dayshift.engine.kernels.cublas_lt import Algorithm, Configured, Product
from dayshift.types import DayshiftError

LEAST_TOKENS = 97  # fewer are not in the table
TABLE = Path(__file__).with_name("tuned_linear.json")
_ALIGNMENT = 16  # bytes, of what the copy engine reads

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tuned:
    """The algorithm for more tokens than the entry in front has, and at most so many; the last one of a
    weight is for all that are more, too. None: cuBLAS's own choice."""

    num_tokens: int
    algorithm: Algorithm | None


Tables = dict[tuple[int, int], tuple[Tuned, ...]]  # by (num_rows, size) of the weight, rising


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x weightᵀ + bias. Shapes and dtypes as in `reference.linear`."""
    if bias is None and _can_be_tuned(x, weight):
        index = _index(x.device, weight.shape, len(x))
        found = None if index is None else _configured(x.device, weight.shape, index)
        if found is not None:
            product, configured = found
            y = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
            if product.run(configured, x, weight, y):
                return y
            _say_refused(x.device, tuple(weight.shape), len(x))
    return F.linear(x, weight, bias)


def entry_for(entries: tuple[Tuned, ...], num_tokens: int) -> int | None:
    """Index of the entry for so many tokens."""
    if num_tokens < LEAST_TOKENS or not entries:
        return None
    found = bisect_left(entries, num_tokens, key=lambda entry: entry.num_tokens)
    return min(found, len(entries) - 1)


def read_tables(path: Path, device_name: str, version: int) -> Tables:
    """What a file has for a GPU and a version of cuBLASLt; nothing for others. Raises DayshiftError for
    another kind of file."""
    try:
        for table in json.loads(path.read_text(encoding="utf-8")):
            if (table["device"], table["cublaslt"]) == (device_name, version):
                return {
                    (product["num_rows"], product["size"]): tuple(
                        Tuned(num_tokens, Algorithm(*numbers) if numbers else None)
                        for num_tokens, *numbers in product["algorithms"]
                    )
                    for product in table["products"]
                }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DayshiftError(f"{path} is no file of --tune-products: {error!r}") from error
    return {}


def write_tables(path: Path, device_name: str, version: int, tables: Tables) -> None:
    """Put tables into a file, in place of those for the same GPU and version, beside all others. Raises
    DayshiftError where it cannot be written."""
    others = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [table for table in others if (table["device"], table["cublaslt"]) != (device_name, version)]
    products = [
        {
            "num_rows": num_rows,
            "size": size,
            "algorithms": [
                [entry.num_tokens, *(astuple(entry.algorithm) if entry.algorithm else ())]
                for entry in entries
            ],
        }
        for (num_rows, size), entries in sorted(tables.items())
    ]
    text = json.dumps([*kept, {"device": device_name, "cublaslt": version, "products": products}], indent=1)
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_text(_with_short_lists(text) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise DayshiftError(f"{path}: {error.strerror}") from error


def _with_short_lists(text: str) -> str:
    """JSON with every list of numbers on one line."""
    parts = text.split("[")
    for i, part in enumerate(parts):
        numbers, bracket, rest = part.partition("]")
        if bracket and "{" not in numbers:
            parts[i] = " ".join(numbers.split()) + bracket + rest
    return "[".join(parts)


def _can_be_tuned(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (
        x.is_cuda
        and len(x) >= LEAST_TOKENS
        and x.dtype == weight.dtype == torch.bfloat16
        and x.dim() == 2
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.data_ptr() % _ALIGNMENT == weight.data_ptr() % _ALIGNMENT == 0
    )


@functools.cache
def _tables(device: torch.device) -> Tables:
    try:
        version = cublas_lt.version()
    except OSError as error:
        logger.warning("cuBLAS chooses the tiles of long prompts: %s", error)
        return {}
    return read_tables(TABLE, torch.cuda.get_device_name(device), version)


def _index(device: torch.device, shape: torch.Size, num_tokens: int) -> int | None:
    num_rows, size = shape
    return entry_for(_tables(device).get((num_rows, size), ()), num_tokens)


@functools.cache
def _product(device: torch.device, shape: torch.Size) -> Product:
    num_rows, size = shape
    return Product(num_rows, size, device)


@functools.cache
def _configured(device: torch.device, shape: torch.Size, index: int) -> tuple[Product, Configured] | None:
    """An entry of the table as the library takes it, or None where cuBLAS chooses, or the library refuses."""
    num_rows, size = shape
    entry = _tables(device)[num_rows, size][index]
    if entry.algorithm is None:
        return None
    product = _product(device, shape)
    configured = product.configured(entry.algorithm, entry.num_tokens)
    if configured is None:
        _say_refused(device, (num_rows, size), entry.num_tokens)
        return None
    return product, configured


@functools.cache
def _say_refused(device: torch.device, shape: tuple[int, ...], num_tokens: int) -> None:
    """Once for each of them."""
    logger.warning(
        "%s refuses the tile that %s names for %d tokens and a weight of %s: cuBLAS chooses one itself",
        torch.cuda.get_device_name(device),
        TABLE.name,
        num_tokens,
        " x ".join(map(str, shape)),
    )
