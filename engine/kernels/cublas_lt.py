"""Products through cuBLASLt by an algorithm that the caller names.

`F.linear` takes the algorithm that a model inside cuBLAS expects to be fastest. This asks the same library,
the one that torch has loaded, for another tile of the same kernels: the results have the same bits, because
every tile sums a row from its first column to its last. Numbers of algorithms are those of `cublasLt.h`.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from dataclasses import astuple, dataclass

import torch

# Of cublasLt.h and library_types.h.
_COMPUTE_32F, _CUDA_R_32F, _CUDA_R_16BF, _OP_T = 68, 0, 14, 1
_DESC_TRANSA, _LAYOUT_COLS, _PREF_MAX_WORKSPACE_BYTES = 3, 3, 1
_CONFIG_SPLIT_K = 2
_MOST_SUGGESTED = 32
_ONE, _ZERO = c_float(1.0), c_float(0.0)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How cuBLASLt cuts a product."""

    tile: int  # cublasLtMatmulTile_t: rows of the weight by tokens
    stages: int  # cublasLtMatmulStages_t
    cluster: int  # cublasLtClusterShape_t
    swizzle: int  # 1: another order of the tiles
    custom: int  # what an algorithm has beside: warp groups that share a tile, the order of a cluster


# Attributes of cublasLtMatmulAlgoConfigAttributes_t, in the order of `Algorithm`.
_CONFIG = ((1, c_uint32), (6, c_uint32), (8, c_uint16), (4, c_uint32), (5, c_uint32))


class Configured(ctypes.Structure):
    """cublasLtMatmulAlgo_t: an algorithm as the library takes it."""

    _fields_ = (("data", c_uint64 * 8),)


class _Suggested(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Configured),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("num_waves", c_float),
        ("reserved", c_int * 4),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """The cuBLASLt that torch has loaded. Raises OSError where there is none."""
    cuda = torch.version.cuda
    if cuda is None:
        raise OSError("this torch has been built without CUDA")
    lib = ctypes.CDLL(f"libcublasLt.so.{cuda.partition('.')[0]}")
    lib.cublasLtGetVersion.restype = c_size_t
    return lib


def version() -> int:
    """As 130100 for 13.1.0."""
    return library().cublasLtGetVersion()


class Product:
    """y = x weightᵀ in bfloat16 with sums in float32, for weights (num_rows, size) on one device.

    Algorithms that need a workspace are left out. For one thread: the number of tokens is kept between calls.
    """

    def __init__(self, num_rows: int, size: int, device: torch.device) -> None:
        self.num_rows, self.size = num_rows, size
        self._lib, self._handle = library(), _handle(device)
        self._operation = c_void_p()
        self._call("MatmulDescCreate", byref(self._operation), _COMPUTE_32F, _CUDA_R_32F)
        transposed = c_int32(_OP_T)
        self._call("MatmulDescSetAttribute", self._operation, _DESC_TRANSA, byref(transposed), c_size_t(4))
        # The library's matrices lie column by column: a weight's rows, and x and y transposed.
        self._weight = self._layout(size, num_rows)
        self._num_tokens = 1
        self._x, self._y = self._layout(size, 1), self._layout(num_rows, 1)

    def suggested(self, num_tokens: int) -> dict[Algorithm, Configured]:
        """What the library's own model suggests for so many tokens, the best first."""
        self._set_tokens(num_tokens)
        preference, workspace_bytes = c_void_p(), c_size_t(0)
        self._call("MatmulPreferenceCreate", byref(preference))
        self._call(
            "MatmulPreferenceSetAttribute",
            preference,
            _PREF_MAX_WORKSPACE_BYTES,
            byref(workspace_bytes),
            c_size_t(8),
        )
        found, num_found = (_Suggested * _MOST_SUGGESTED)(), c_int()
        try:
            self._call(
                "MatmulAlgoGetHeuristic",
                self._handle,
                self._operation,
                *self._layouts(),
                preference,
                _MOST_SUGGESTED,
                found,
                byref(num_found),
            )
        finally:
            self._call("MatmulPreferenceDestroy", preference)
        algorithms = [found[i].algorithm for i in range(num_found.value) if found[i].state == 0]
        return {self._named(one): one for one in algorithms if self._attribute(one, _CONFIG_SPLIT_K) == 1}

    def configured(self, algorithm: Algorithm, num_tokens: int) -> Configured | None:
        """An algorithm for so many tokens, whether the library suggests it or not; None if it refuses."""
        suggested = self.suggested(num_tokens)
        if algorithm in suggested or not suggested:
            return suggested.get(algorithm)
        return self.changed(next(iter(suggested.values())), algorithm, num_tokens)

    def changed(self, base: Configured, algorithm: Algorithm, num_tokens: int) -> Configured | None:
        """One of the same kernels as `base` that cuts as `algorithm` says; None if there is none."""
        made = Configured.from_buffer_copy(base)
        for (attribute, kind), value in zip(_CONFIG, astuple(algorithm), strict=True):
            number = kind(value)
            status = self._lib.cublasLtMatmulAlgoConfigSetAttribute(
                byref(made), attribute, byref(number), c_size_t(ctypes.sizeof(kind))
            )
            if status:
                return None
        self._set_tokens(num_tokens)
        checked = _Suggested()
        status = self._lib.cublasLtMatmulAlgoCheck(
            self._handle, self._operation, *self._layouts(), byref(made), byref(checked)
        )
        return made if status == 0 and checked.workspace_bytes == 0 else None

    def run(self, configured: Configured, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> bool:
        """y (num_tokens, num_rows) = x (num_tokens, size) weightᵀ on the current stream, where CUDA graphs
        may capture it. All contiguous, and aligned to 16 bytes. False: refused, and nothing was launched."""
        self._set_tokens(len(x))
        a, b, c, d = self._layouts()
        out, no_workspace = c_void_p(y.data_ptr()), c_void_p()
        status = self._lib.cublasLtMatmul(
            self._handle,
            self._operation,
            byref(_ONE),
            c_void_p(weight.data_ptr()),
            a,
            c_void_p(x.data_ptr()),
            b,
            byref(_ZERO),
            out,
            c,
            out,
            d,
            byref(configured),
            no_workspace,
            c_size_t(0),
            c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        return status == 0

    def _layouts(self) -> tuple[c_void_p, c_void_p, c_void_p, c_void_p]:
        return self._weight, self._x, self._y, self._y

    def _layout(self, num_rows: int, num_columns: int) -> c_void_p:
        layout = c_void_p()
        sizes = c_uint64(num_rows), c_uint64(num_columns), c_int64(num_rows)
        self._call("MatrixLayoutCreate", byref(layout), _CUDA_R_16BF, *sizes)
        return layout

    def _set_tokens(self, num_tokens: int) -> None:
        if num_tokens == self._num_tokens:
            return
        number = c_uint64(num_tokens)
        for layout in (self._x, self._y):
            self._call("MatrixLayoutSetAttribute", layout, _LAYOUT_COLS, byref(number), c_size_t(8))
        self._num_tokens = num_tokens

    def _named(self, configured: Configured) -> Algorithm:
        return Algorithm(*(self._attribute(configured, attribute) for attribute, _ in _CONFIG))

    def _attribute(self, configured: Configured, attribute: int) -> int:
        kind = dict(_CONFIG).get(attribute, c_uint32)
        value, num_bytes = kind(), c_size_t()
        self._call(
            "MatmulAlgoConfigGetAttribute",
            byref(configured),
            attribute,
            byref(value),
            c_size_t(ctypes.sizeof(kind)),
            byref(num_bytes),
        )
        return value.value

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, f"cublasLt{name}")(*args)
        if status:
            raise RuntimeError(
                f"cublasLt{name} returned {status} for a weight of {self.num_rows} x {self.size}"
            )


@functools.cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    with torch.cuda.device(device):
        status = library().cublasLtCreate(byref(handle))
    if status:
        raise RuntimeError(f"cublasLtCreate returned {status} for {device}")
    return handle
