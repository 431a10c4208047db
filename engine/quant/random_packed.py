"""Random quantised matrices as they lie in memory, for benchmarks: no file, nothing repacked."""

from __future__ import annotations

import math

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from dayshift.engine.quant.dequantize import OFFSETS
from dayshift.engine.quant.packed import FORMATS, LANE, PackedMatrix

Q = GGMLQuantizationType
_WITH_MINIMUM = (Q.Q4_1, Q.Q5_1, Q.Q2_K, Q.Q4_K, Q.Q5_K)
_GROUP_SCALE = 8  # of K-types; any number does
_FLOAT4_EXPONENT = 120  # 2**-7 times e2m1 floats, whose root mean square is 2.9


def random_packed(
    quant_type: GGMLQuantizationType, shape: tuple[int, ...], generator: torch.Generator, std: float = 0.02
) -> PackedMatrix:
    """A matrix (num_rows, num_columns) or (num_experts, num_rows, num_columns) of random integers on the
    generator's device. Its weights have the standard deviation `std` (in MXFP4: 0.023), their mean is
    at most half a step of the integers from 0.

    Raises KeyError for a type that is not in `FORMATS`.
    """
    form, block_size = FORMATS[quant_type], GGML_QUANT_SIZES[quant_type][0]
    *experts, num_rows, num_columns = shape
    all_rows = math.prod(shape[:-1])

    def words(num_bits: int) -> Tensor:
        least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
        size = (all_rows, num_columns // LANE * num_bits)
        return torch.randint(
            least, most + 1, size, dtype=torch.int32, generator=generator, device=generator.device
        )

    def filled(value: float, dtype: torch.dtype, weights_of_each: int) -> Tensor:
        size = (all_rows, num_columns // weights_of_each)
        return torch.full(size, value, dtype=dtype, device=generator.device)

    largest = (1 << form.low_bits + form.high_bits) - 1
    scale = std * math.sqrt(12 / (largest * (largest + 2)))  # integers from 0 to the largest, all as likely
    minimum = scale * (largest / 2 - OFFSETS.get(quant_type, 0))
    has_groups, has_minimum = block_size > form.group, quant_type in _WITH_MINIMUM
    of_group = _GROUP_SCALE if has_groups else 1
    groups = filled(of_group, torch.int8, form.group) if has_groups else None
    return PackedMatrix(
        quant_type=quant_type,
        num_experts=experts[0] if experts else None,
        num_rows=num_rows,
        num_columns=num_columns,
        low=words(form.low_bits),
        high=words(form.high_bits) if form.high_bits else None,
        scales=filled(_FLOAT4_EXPONENT, torch.uint8, block_size)
        if quant_type == Q.MXFP4
        else filled(scale / of_group, torch.float16, block_size),
        minimums=filled(minimum / of_group, torch.float16, block_size) if has_minimum else None,
        group_scales=groups,
        group_minimums=groups if has_minimum else None,
    )
