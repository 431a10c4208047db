"""numpy arrays in msgpack, as openpi's and vla-eval's clients write and read them. Never pickle.

An array is a map with the key `__ndarray__` (openpi: bytes, vla-eval: text), data, dtype and shape;
vla-eval also sends images as PNG or JPEG under the key `__image__`.
"""

from __future__ import annotations

import io
import math
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from dayshift.engine.api import InvalidRequestError

_KINDS = "biuf"  # bool, int, unsigned, float
_MAX_PIXELS = 4096 * 4096
_FORMATS = ("PNG", "JPEG")


def pack(value: Any, *, text_keys: bool) -> bytes:
    """Encode maps, lists, numbers, texts and arrays; `text_keys` as vla-eval wants it, else as openpi."""

    def encode(item: Any) -> Any:
        if not isinstance(item, np.ndarray):
            raise TypeError(f"{type(item).__name__} cannot be packed")
        fields = {
            "__ndarray__": True,
            "data": np.ascontiguousarray(item).tobytes(),
            "dtype": item.dtype.str,
            "shape": list(item.shape),
        }
        return fields if text_keys else {name.encode(): field for name, field in fields.items()}

    return msgspec.msgpack.encode(value, enc_hook=encode)


def unpack(data: bytes) -> Any:
    """Inverse of `pack`, with either kind of keys. Raises InvalidRequestError."""
    try:
        return _with_arrays(msgspec.msgpack.decode(data))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the message is not msgpack: {error}") from error


def _with_arrays(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_arrays(item) for item in value]
    if not isinstance(value, dict):
        return value
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: item for key, item in value.items()}
    if "__ndarray__" in named:
        return _array(named.get("data"), named.get("dtype"), named.get("shape"))
    if "__npgeneric__" in named:
        return named.get("data")
    if "__image__" in named:
        if named.get("format") == "raw":
            return _array(named.get("data"), named.get("dtype"), named.get("shape"))
        return _image(named.get("data"))
    return {key: _with_arrays(item) for key, item in named.items()}


def _array(data: Any, dtype_name: Any, shape: Any) -> np.ndarray:
    try:
        dtype = np.dtype(dtype_name)
    except TypeError as error:
        raise InvalidRequestError(f"array of unknown dtype {dtype_name!r}") from error
    if dtype.kind not in _KINDS or dtype.hasobject:
        raise InvalidRequestError(f"array of dtype {dtype_name!r}; allowed are numbers and bool")
    is_shape = isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)
    if not is_shape or not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        raise InvalidRequestError(f"array of shape {shape!r} and dtype {dtype_name!r} does not fit its data")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _image(data: Any) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise InvalidRequestError(f"image of {image.width} x {image.height} pixels is too large")
            return np.asarray(image.convert("RGB"))
    except (OSError, TypeError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidRequestError("an image is neither PNG nor JPEG") from error
