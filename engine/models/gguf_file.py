"""A GGUF file: metadata and tensors. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from dayshift.types import DayshiftError

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<num_parts>\d{5})\.gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor as it lies in the file."""

    shape: tuple[int, ...]  # slowest dimension first, as in torch
    quant_type: GGMLQuantizationType
    raw: np.ndarray  # uint8 (*shape[:-1], bytes of a row), mapped from the file


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """What a GGUF file, or the parts of a split one, hold.

    `metadata_bytes` are the (first) file's first bytes, before the tensors.
    """

    path: Path
    parts: tuple[Path, ...]  # all files, `path` the first
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    metadata_bytes: int

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture."""
        return self.require("general.architecture")

    def require(self, key: str) -> Any:
        """A metadata value. Raises DayshiftError when it is missing."""
        if key not in self.metadata:
            raise DayshiftError(f"{self.path}: the GGUF metadata has no {key}")
        return self.metadata[key]


def open_gguf(path: Path) -> GgufFile:
    """Read a GGUF file's metadata and map its tensors; any part of a split file stands for all of it.

    Raises DayshiftError for a file that is damaged, or lacks one of its parts.
    """
    parts = gguf_parts(path)
    try:
        stats = [part.stat() for part in parts]
    except OSError as error:
        raise DayshiftError(f"{error.filename} cannot be read: {error.strerror}") from error
    return _open(parts, tuple((stat.st_size, stat.st_mtime_ns) for stat in stats))


def gguf_parts(path: Path) -> tuple[Path, ...]:
    """The files of a split GGUF file (`…-00001-of-00003.gguf`), or the file itself."""
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, num_parts = match["stem"], int(match["num_parts"])
    return tuple(
        path.with_name(f"{stem}-{index:05}-of-{num_parts:05}.gguf") for index in range(1, num_parts + 1)
    )


# Metadata of 300,000 tokens and merges takes seconds to read, and configuration, tokenizer and
# weights each want some of it.
@lru_cache(maxsize=1)
def _open(parts: tuple[Path, ...], _stats: tuple[tuple[int, int], ...]) -> GgufFile:
    first, *others = [_read(part) for part in parts]
    num_parts = first.metadata.get("split.count", 0) or 1
    if num_parts != len(parts):
        raise DayshiftError(
            f"{parts[0]} is one of {num_parts} parts of a split GGUF file; its name has to end in "
            f"-00001-of-{num_parts:05}.gguf"
        )
    tensors = dict(first.tensors)
    for other in others:
        tensors |= other.tensors
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if len(tensors) != expected:
        raise DayshiftError(f"{parts[0]} and its other parts hold {len(tensors)} of {expected} weights")
    return replace(first, parts=parts, tensors=tensors)


def _read(path: Path) -> GgufFile:
    try:
        # Mapped copy-on-write: torch warns about arrays that cannot be written.
        reader = gguf.GGUFReader(path, "c")
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise DayshiftError(f"{path} is not a readable GGUF file: {error}") from error
    return GgufFile(
        path=path, parts=(path,), metadata=metadata, tensors=tensors, metadata_bytes=int(reader.data_offset)
    )


def _tensor(tensor: gguf.ReaderTensor) -> GgufTensor:
    raw = np.asarray(tensor.data).view(np.uint8)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GgufTensor(shape=shape, quant_type=tensor.tensor_type, raw=raw)
