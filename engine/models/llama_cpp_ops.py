"""llama.cpp's arithmetic on an x86 CPU with AVX2 and FMA, bit for bit, for blocks of Q4_1 and Q8_0.

A product with a quantised matrix rounds its input to 8 bits in blocks of 32, so a last bit that differs
before it becomes a step of 1/127 of a block's largest value behind it. Equal text therefore needs equal
bits: the sums below are made of the same partial sums, in the same order, as llama.cpp makes them.
Eight lanes of a vector register are a dimension of 8 here; a fused multiply-add (one rounding) is computed
in float64, which holds its product exactly. Everything is float32 otherwise.

Sources: ggml/src/ggml-cpu (arch/x86/quants.c, vec.cpp, vec.h, ops.cpp, llamafile/sgemm.cpp) of llama.cpp,
build 11549.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes.util import find_library
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType
from torch import Tensor

from dayshift.engine.quant.dequantize import OFFSETS
from dayshift.engine.quant.packed import PackedMatrix, integers
from dayshift.types import DayshiftError

QUANT_TYPES = (GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
_BLOCK, _LANES = 32, 8
_TOKENS_AT_ONCE = 64  # intermediate results of a product stay within some ten MiB
_QUERIES_AT_ONCE = 16
_MAX_INT8 = 127.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMatrix:
    """A quantised matrix, as `product` reads it. A weight is scale * integer + shift."""

    integers: Tensor  # float32 (num_blocks, 8, 4, num_rows): the 32 of a block, four to a lane
    scales: Tensor  # float32 (num_blocks, num_rows)
    shifts: Tensor | None  # float32 (num_blocks, num_rows)


def block_matrix(matrix: PackedMatrix) -> BlockMatrix:
    """Raises DayshiftError for a type that is not in `QUANT_TYPES`."""
    if matrix.quant_type not in QUANT_TYPES:
        raise DayshiftError(
            f"arithmetic llama.cpp: a matrix is quantised as {matrix.quant_type.name}; "
            f"allowed are {', '.join(quant_type.name for quant_type in QUANT_TYPES)}"
        )
    whole = integers(matrix).float() - OFFSETS.get(matrix.quant_type, 0)
    lanes = whole.view(matrix.num_rows, -1, _LANES, _BLOCK // _LANES)
    return BlockMatrix(
        integers=lanes.permute(1, 2, 3, 0).contiguous(),
        scales=matrix.scales.float().T.contiguous(),
        shifts=None if matrix.minimums is None else -matrix.minimums.float().T.contiguous(),
    )


def product(x: Tensor, matrix: BlockMatrix) -> Tensor:
    """(num_tokens, num_columns) -> (num_tokens, num_rows); `ggml_vec_dot_q4_1_q8_1`, `..._q8_0_q8_0`."""
    return torch.cat([_product(tokens, matrix) for tokens in x.split(_TOKENS_AT_ONCE)])


def _product(x: Tensor, matrix: BlockMatrix) -> Tensor:
    blocks = x.unflatten(1, (-1, _BLOCK))  # (num_tokens, num_blocks, 32)
    largest = blocks.abs().amax(2).double()
    scale = (largest / _MAX_INT8).float()
    to_int8 = torch.where(largest == 0, 0.0, _MAX_INT8 / largest).float()
    rounded = (blocks * to_int8.unsqueeze(2)).round()
    sums = (rounded.sum(2) * scale).half().double()
    scale = scale.half().float()
    lanes = rounded.unflatten(2, (_LANES, -1)).permute(1, 2, 0, 3)  # (num_blocks, 8, num_tokens, 4)

    total = torch.zeros(_LANES, len(x), matrix.scales.shape[1], dtype=torch.float64)
    shift = torch.zeros(total.shape[1:], dtype=torch.float64)
    for block, whole in enumerate(matrix.integers):
        both = (scale[:, block, None] * matrix.scales[block]).double()  # (num_tokens, num_rows)
        total.addcmul_(both, (lanes[block] @ whole).double())
        total.copy_(total.float())
        if matrix.shifts is not None:
            shift.addcmul_(sums[:, block, None], matrix.shifts[block].double())
            shift.copy_(shift.float())
    out = _sum_of_lanes(total.float().movedim(0, -1))
    return out if matrix.shifts is None else out + shift.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight, the squares summed in float64; (num_tokens, size)."""
    mean = (x.square().double().sum(1, keepdim=True) / x.shape[1]).float()
    # In float64, because torch's float32 roots and reciprocals are not always the nearest ones.
    root = (mean + eps).double().sqrt().float()
    return x * (1.0 / root.double()).float() * weight


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; (num_tokens, 2 * size) -> (num_tokens, size); `ggml_vec_swiglu_f32`."""
    gate, up = gate_up.chunk(2, dim=1)
    return gate / (1.0 + exp(-gate)) * up


def exp(x: Tensor) -> Tensor:
    """e to the power of x, elementwise, by a polynomial within two units of the last place; `ggml_v_expf`.

    Exact where the result is a normal number.
    """
    x = x.clamp(-200.0, 200.0)  # zero and infinite in float32
    n = _fma(x, _hex("0x1.715476p+0"), _hex("0x1.8p23")) - _hex("0x1.8p23")  # round(x / ln 2)
    rest = _fma(-n, _hex("0x1.7f7d1cp-20"), _fma(-n, _hex("0x1.62e4p-1"), x))
    square = rest * rest
    high = _fma(rest, _hex("0x1.0e4020p-7"), _hex("0x1.573e2ep-5"))
    low = _fma(rest, _hex("0x1.555e66p-3"), _hex("0x1.fffdb6p-2"))
    minus_one = _fma(_fma(high, square, low), square, rest * _hex("0x1.ffffecp-1"))
    return (torch.exp2(n.double()) * (1.0 + minus_one.double())).float()


def rope_angles(num_positions: int, head_dim: int, theta: float) -> Tensor:
    """float32 (num_positions, head_dim): cosines in the first half of a row, sines in the second.

    Each angle is the one before it times one factor, rounded every time; `ggml_rope_cache_init`.
    """
    factor = torch.tensor(theta ** (-2.0 / head_dim), dtype=torch.float64).float()
    angles = [torch.arange(num_positions, dtype=torch.float32)]
    for _ in range(head_dim // 2 - 1):
        angles.append(angles[-1] * factor)
    flat = torch.stack(angles, dim=1).flatten().tolist()
    table = torch.tensor([[function(angle) for angle in flat] for function in _cosine_and_sine()])
    return table.view(2, num_positions, -1).transpose(0, 1).flatten(1)


def _cosine_and_sine() -> tuple[Callable[[float], float], Callable[[float], float]]:
    """The C library's, which llama.cpp calls too: one in a hundred of their results is not the nearest."""
    library = ctypes.CDLL(find_library("m"))
    for function in (library.cosf, library.sinf):
        function.restype, function.argtypes = ctypes.c_float, (ctypes.c_float,)
    return library.cosf, library.sinf


def rope(x: Tensor, angles: Tensor) -> Tensor:
    """(num_tokens, heads, head_dim), pairs dealt to its two halves -> rotated, pairs side by side."""
    first, second = x.chunk(2, dim=2)
    cos, sin = angles.unsqueeze(1).chunk(2, dim=2)
    turned = (_fma(first, cos, -(second * sin)), _fma(first, sin, second * cos))
    return torch.stack(turned, dim=-1).flatten(2)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of the last queries of a sequence, without flash attention.

    q: (num_queries, heads, head_dim); k, v: (num_keys, kv_heads, head_dim), of which the last
    `num_queries` are the queries' own. Several queries sum their values in another order than one
    alone: llama.cpp has a matrix product for them.
    """
    num_queries, num_keys = len(q), len(k)
    padding = -num_keys % (4 * _LANES)
    group = q.shape[1] // k.shape[1]
    keys = k.transpose(0, 1).repeat_interleave(group, dim=0)  # (heads, num_keys, head_dim)
    values = F.pad(v.permute(1, 2, 0), (0, padding)).repeat_interleave(group, dim=0)
    out: list[Tensor] = []
    for rows in torch.arange(num_queries).split(_QUERIES_AT_ONCE):
        tile = q[rows].unsqueeze(2)
        scores = _dot(tile, keys, has_tiles=False) * scale  # (rows, heads, num_keys)
        last = rows.view(-1, 1, 1) + num_keys - num_queries
        scores = scores.masked_fill(torch.arange(num_keys) > last, float("-inf"))
        weights = _softmax(F.pad(scores, (0, padding), value=float("-inf")))
        out.append(_dot(weights.unsqueeze(2), values, has_tiles=num_queries > 1))
    return torch.cat(out)


def _softmax(scores: Tensor) -> Tensor:
    """Over the last dimension, a multiple of 8: eights summed in float32, their sums in float64."""
    powers = exp(scores - scores.amax(-1, keepdim=True))
    total = _sum_of_lanes(powers.unflatten(-1, (-1, _LANES))).double().sum(-1, keepdim=True)
    return powers * (1.0 / total).float()


def _dot(x: Tensor, y: Tensor, *, has_tiles: bool) -> Tensor:
    """Sum of x * y over the last dimension, a multiple of 32.

    `ggml_vec_dot_f32` sums in four registers, `llamafile_sgemm`'s tiles in one.
    """
    num_registers = 1 if has_tiles else 4
    step = num_registers * _LANES
    shape = torch.broadcast_shapes(x.shape, y.shape)[:-1]
    total = torch.zeros(*shape, step)
    for left, right in zip(x.split(step, dim=-1), y.split(step, dim=-1), strict=True):
        total = _fma(left, right, total)
    if has_tiles:
        return _sum_of_lanes(total)
    first, second, third, fourth = total.split(_LANES, dim=-1)
    low, high = ((first + third) + (second + fourth)).split(4, dim=-1)
    a, b, c, d = (low + high).unbind(-1)
    return (a + b) + (c + d)


def _sum_of_lanes(x: Tensor) -> Tensor:
    """Over the last dimension, of 8, halving it each time."""
    while x.shape[-1] > 1:
        low, high = x.chunk(2, dim=-1)
        x = low + high
    return x.squeeze(-1)


def _fma(x: Tensor, y: Tensor | float, z: Tensor | float) -> Tensor:
    """x * y + z with one rounding."""
    wide = x.double() * (y.double() if isinstance(y, Tensor) else y)
    return (wide + (z.double() if isinstance(z, Tensor) else z)).float()


def _hex(number: str) -> float:
    return float.fromhex(number)
