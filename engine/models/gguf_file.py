"""A GGUF file: metadata and tensors. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

from dayshift.types import DayshiftError


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor as it lies in the file."""

    shape: tuple[int, ...]  # slowest dimension first, as in torch
    quant_type: GGMLQuantizationType
    raw: np.ndarray  # uint8 (*shape[:-1], bytes of a row), mapped from the file


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """What a GGUF file holds. `metadata_bytes` are its first bytes, before the tensors."""

    path: Path
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
    """Read a GGUF file's metadata and map its tensors.

    Raises DayshiftError for a file that is damaged, or one part of several.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise DayshiftError(f"{path} cannot be read: {error.strerror}") from error
    return _open(path, stat.st_size, stat.st_mtime_ns)


# Metadata of 300,000 tokens and merges takes seconds to read, and configuration, tokenizer and
# weights each want some of it.
@lru_cache(maxsize=1)
def _open(path: Path, _size: int, _mtime_ns: int) -> GgufFile:
    try:
        # Mapped copy-on-write: torch warns about arrays that cannot be written.
        reader = gguf.GGUFReader(path, "c")
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: _tensor(tensor) for tensor in reader.tensors}
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise DayshiftError(f"{path} is not a readable GGUF file: {error}") from error
    if metadata.get("split.count", 1) > 1:
        raise DayshiftError(
            f"{path} is one part of a split GGUF file; join the parts with llama-gguf-split --merge"
        )
    return GgufFile(path=path, metadata=metadata, tensors=tensors, metadata_bytes=int(reader.data_offset))


def _tensor(tensor: gguf.ReaderTensor) -> GgufTensor:
    raw = np.asarray(tensor.data).view(np.uint8)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return GgufTensor(shape=shape, quant_type=tensor.tensor_type, raw=raw)
