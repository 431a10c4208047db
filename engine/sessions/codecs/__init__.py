"""Codecs of KV at rest: how a KV piece is written, in memory and on disk. Each piece names its own.

Everything is torch and runs where the KV is, so that a GPU's KV crosses to the host encoded. The
layouts are in docs/session-store.md; ratio, loss and speed in docs/session-memory.md.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dayshift.engine.sessions.archive import KVUnavailableError
from dayshift.engine.sessions.codecs.packing import Part, dims_of, ranges_of_layers
from dayshift.engine.sessions.codecs.plain import BFloat16Codec, RawCodec
from dayshift.engine.sessions.codecs.residual import ResidualCodec
from dayshift.engine.sessions.codecs.rotated import Rotated4Codec
from dayshift.engine.sessions.codecs.scaled import ScaledCodec
from dayshift.engine.sessions.record_format import KVDims, KVFormat
from dayshift.engine.sessions.records import KVPiece
from dayshift.types import DayshiftError


class KVNotEncodableError(DayshiftError):
    """KV that a codec cannot hold: infinities, NaN, or numbers beyond its limit."""


class Codec(Protocol):
    """A way to write KV (2, num_layers, num_tokens, num_kv_heads, head_dim) as bytes."""

    @property
    def limit(self) -> float | None:
        """The largest absolute value that it takes; None if it keeps whatever bits there are."""
        ...

    def parts(self, dims: KVDims, dtype: torch.dtype) -> tuple[Part, ...]:
        """The arrays of a payload, in order. `dtype` is that of the KV."""
        ...

    def encode(self, kv: Tensor) -> Tensor:
        """uint8 (num_bytes,) on the same device."""
        ...

    def decode(self, payload: Tensor, dims: KVDims, dtype: torch.dtype, out: Tensor) -> None:
        """Write the KV of a payload whose length is right to `out`, of these dims and any float dtype."""
        ...


CODECS: dict[str, Codec] = {
    "raw": RawCodec(),
    "bf16": BFloat16Codec(),
    "int8": ScaledCodec(torch.int8),
    "fp8": ScaledCodec(torch.float8_e4m3fn),
    "rot4": Rotated4Codec(),
    "residual": ResidualCodec(),
}


@dataclass(frozen=True, slots=True)
class Encoded:
    """KV as a codec wrote it. `payload`, uint8 (num_bytes,), is on the KV's device.

    `is_sound`, bool () there, is false for KV that the codec cannot hold: its payload means nothing. It is
    left on the device, so that the host need not wait. None: the codec holds whatever there is.
    """

    form: KVFormat
    payload: Tensor
    is_sound: Tensor | None

    def to_host(self) -> KVPiece:
        """Waits for the device. Raises KVNotEncodableError."""
        if self.is_sound is not None and not self.is_sound:
            raise not_encodable(self.form.codec)
        return KVPiece(self.form, self.payload.cpu().numpy())


def not_encodable(name: str) -> KVNotEncodableError:
    """The error of KV that a codec cannot hold."""
    return KVNotEncodableError(
        f"KV with infinities, NaN or numbers beyond {CODECS[name].limit:g} cannot be written as {name}, "
        "only as raw"
    )


def encode(name: str, kv: Tensor) -> KVPiece:
    """Write KV, a copy from the pool, with a codec. Raises KVNotEncodableError."""
    return encode_payload(name, kv).to_host()


def encode_payload(name: str, kv: Tensor) -> Encoded:
    """As `encode`; all stays on the KV's device."""
    codec, is_sound = CODECS[name], None
    if codec.limit is not None:
        is_sound = (kv.abs() <= codec.limit).all()
        kv = torch.where(is_sound, kv, 0)  # codecs look values up in tables
    _, num_layers, num_tokens, num_kv_heads, head_dim = dims_of(kv)
    dtype = str(kv.dtype).removeprefix("torch.")
    form = KVFormat(name, dtype, num_layers, num_tokens, num_kv_heads, head_dim)
    return Encoded(form, codec.encode(kv), is_sound)


def decode(piece: KVPiece, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The KV of a piece, for the pool. Raises KVUnavailableError: unknown codec, or wrong length."""
    check_payload(piece.format, piece.data.size)
    return decode_payload(piece.format, torch.from_numpy(piece.data).to(device), dtype=dtype)


def check_payload(form: KVFormat, num_bytes: int) -> None:
    """Raise KVUnavailableError for an unknown codec, or a payload that cannot be of this format."""
    if form.codec not in CODECS:
        raise KVUnavailableError(f"stored as {form.codec}, which this version does not know")
    expected = sum(part.num_bytes for part in _parts(form))
    if num_bytes != expected:
        raise KVUnavailableError(f"{num_bytes} bytes of {form.codec}, expected {expected}")


def decode_payload(form: KVFormat, payload: Tensor, *, dtype: torch.dtype) -> Tensor:
    """As `decode`, of checked bytes that are on the pool's device."""
    out = torch.empty(form.dims, dtype=dtype, device=payload.device)
    decode_layers(form, payload, out)
    return out


def decode_layers(form: KVFormat, payload: Tensor, out: Tensor) -> None:
    """Write to `out` (2, layers, num_tokens, num_kv_heads, head_dim) the KV of a payload, of which only the
    bytes of these layers are left, see `layer_ranges`."""
    codec = CODECS[form.codec]
    codec.decode(payload, dims_of(out), getattr(torch, form.dtype), out)
    if codec.limit is not None:  # the grid's last level may lie beyond the largest number of the dtype
        largest = torch.finfo(out.dtype).max
        out.clamp_(-largest, largest)


def layer_ranges(form: KVFormat, layers: range) -> list[tuple[int, int]]:
    """The (start, end) of the bytes of these layers in a payload of this format, ascending."""
    return ranges_of_layers(_parts(form), form.num_layers, layers)


def _parts(form: KVFormat) -> tuple[Part, ...]:
    return CODECS[form.codec].parts(form.dims, getattr(torch, form.dtype))


@functools.cache
def num_bytes_per_token(name: str, dims: KVDims, dtype: torch.dtype) -> float:
    """Average over a piece of `dims`."""
    return sum(part.num_bytes for part in CODECS[name].parts(dims, dtype)) / dims[2]
