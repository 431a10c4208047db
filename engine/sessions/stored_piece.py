"""A turn's KV on the host, as a tier keeps it: what lies between an archive or host memory and the pool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor

from dayshift.engine.sessions import codecs
from dayshift.engine.sessions.record_format import KVFormat


class Tier(StrEnum):
    """Where a piece is, nearest first."""

    HOST = "host"
    ARCHIVE = "archive"


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A turn's KV as a tier keeps it: `parts` are uint8 on the host, one after the other."""

    form: KVFormat
    parts: list[Tensor]

    @property
    def num_tokens(self) -> int:
        return self.form.num_tokens

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() for part in self.parts)

    def parts_of(self, layers: range) -> list[Tensor]:
        """The bytes of these layers alone."""
        return list(cut(self.parts, codecs.layer_ranges(self.form, layers)))


def cut(parts: Sequence[Tensor], ranges: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
    """Views of the bytes [start, end) of a row of parts, range by range."""
    for start, end in ranges:
        place = 0
        for part in parts:
            if start < place + part.numel() and end > place:
                yield part[max(0, start - place) : end - place]
            place += part.numel()
