"""Tensor parallel: which part of a model a process has, and how the parts come together.

Every layer is split once by rows and once by columns (Shoeybi et al., arXiv:1909.08053): heads of queries,
keys and values, then the columns of the output projection; rows of gate and up, then the columns of down.
Between the two nothing is exchanged, after them partial sums are added. Experts are split as the dense MLP
is, by their inner columns, and not one by one: every process then has the same work in every step, whichever
experts the tokens choose, and the same single sum follows. Norms and routers are whole everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dayshift.engine.models.config import ModelConfig
from dayshift.types import DayshiftError

# The dimension along which a parameter is split, by the end of its name; those that are not here are whole.
_SPLIT_DIMS = {
    "embed.weight": 0,
    "lm_head.weight": 0,
    "qkv_proj.weight": -2,
    "qkv_proj.bias": -1,
    "sinks": -1,
    "o_proj.weight": -1,
    "gate_up_proj.weight": -2,
    "down_proj.weight": -1,
    "experts_gate_up": -2,
    "experts_gate_up_bias": -1,
    "experts_down": -1,
}
# Two halves, one below the other, when a file has gate and up in one weight.
_OF_TWO_HALVES = ("experts_gate_up", "experts_gate_up_bias")
# Added once to the sum of all parts.
_OF_FIRST_RANK = ("o_proj.bias", "experts_down_bias")


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size`. With more than one part, all processes of the default group call alike."""

    rank: int = 0
    size: int = 1

    def of(self, config: ModelConfig) -> ModelConfig:
        """The shape of this part of a model. Raises DayshiftError when the model cannot be split so."""
        if self.size == 1:
            return config
        moe = config.moe
        return replace(
            config,
            num_heads=self._part_of("num_attention_heads", config.num_heads),
            num_kv_heads=self._part_of("num_key_value_heads", config.num_kv_heads),
            vocab_size=self._part_of("vocab_size", config.vocab_size),
            intermediate_size=config.intermediate_size
            if moe is not None
            else self._part_of("intermediate_size", config.intermediate_size),
            moe=None
            if moe is None
            else replace(
                moe, intermediate_size=self._part_of("moe_intermediate_size", moe.intermediate_size)
            ),
        )

    def whole_shape(self, parameter: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a weight has in a file, of which a part has `shape`."""
        dim = _SPLIT_DIMS.get(_own_name(parameter))
        if dim is None:
            return shape
        sizes = list(shape)
        sizes[dim] *= self.size
        return tuple(sizes)

    def cut(self, parameter: str, weight: Tensor, *, is_fused: bool) -> Tensor:
        """This part of a weight, a view where it can be one: of a mapped file, only what is cut out is read.

        `is_fused`: the weight has gate and up in one.
        """
        name = _own_name(parameter)
        if self.size == 1:
            return weight
        if name in _OF_FIRST_RANK:
            return weight if self.rank == 0 else torch.zeros_like(weight)
        dim = _SPLIT_DIMS.get(name)
        if dim is None:
            return weight
        if is_fused and name in _OF_TWO_HALVES:
            halves = weight.unflatten(dim, (2, -1))
            return halves.chunk(self.size, dim)[self.rank].flatten(dim - 1, dim)
        return weight.chunk(self.size, dim)[self.rank]

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all parts' tensors, in place."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def gather_columns(self, x: Tensor) -> Tensor:
        """(num_rows, n) of each part -> (num_rows, size * n), in the order of the ranks."""
        if self.size == 1:
            return x
        parts = x.new_empty((self.size * len(x), x.shape[1]))
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(self.size, len(x), -1).transpose(0, 1).reshape(len(x), -1)

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest of all parts' values."""
        if self.size == 1:
            return value
        smallest = torch.tensor([value], device=device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest.item())

    def _part_of(self, name: str, whole: int) -> int:
        if whole % self.size:
            raise DayshiftError(f"tensor_parallel {self.size} does not divide the model's {name} of {whole}")
        return whole // self.size


WHOLE = Shard()


def _own_name(parameter: str) -> str:
    """`qkv_proj.weight` of `layers.3.qkv_proj.weight`, `sinks` of `layers.3.sinks`."""
    parts = parameter.split(".")
    return ".".join(parts[-2:]) if parts[-1] in ("weight", "bias") else parts[-1]
