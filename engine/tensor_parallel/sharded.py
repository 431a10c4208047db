"""The KV pool and the model runner of rank 0: each tells the workers what it is about to do.

Outside they are as the ones of a single device: what is read from the pool has all heads, in one piece.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dayshift.engine.block_pool import BlockPool
from dayshift.engine.model_runner import ModelRunner, small_pool_options
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.step_graphs import StepInputs, StepShape
from dayshift.engine.tensor_parallel.messages import CopyBlock, OpenRunner, ReadKV, RunStep, WriteKV
from dayshift.engine.tensor_parallel.workers import Workers

_HEADS = 3  # dimension of (2, num_layers, num_tokens, num_kv_heads, head_dim)
_PROBE = 1


class ShardedPool(BlockPool):
    """Hands out blocks for all ranks, and has the first heads of their KV."""

    def __init__(self, *args: Any, workers: Workers, runner: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._workers, self._runner = workers, runner

    @property
    def num_kv_heads(self) -> int:
        """Of all ranks."""
        return self.config.num_kv_heads * self._workers.size

    def read_slots(self, slots: list[int]) -> Tensor:
        """All heads of some slots."""
        with self._workers.told(ReadKV(self._runner, slots)):
            return gather_heads(super().read_slots(slots), self._workers.size)

    def write_layers(self, slots: list[int], layers: range, piece: Tensor) -> None:
        """Put all heads of some slots; of all layers at once."""
        assert len(layers) == self.config.num_layers
        with self._workers.told(WriteKV(self._runner, slots)):
            parts = [part.to(self.dtype).contiguous() for part in piece.chunk(self._workers.size, _HEADS)]
            super().write_layers(slots, layers, scatter_heads(torch.empty_like(parts[0]), parts))

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of every rank onto another."""
        with self._workers.told(CopyBlock(self._runner, source, target)):
            super().copy_block(source, target)


class ShardedRunner(ModelRunner):
    """Runs the first part of the decoder while the workers run theirs; its logits are whole."""

    def __init__(
        self, model: Decoder, pool: BlockPool, *, workers: Workers, runner: int = 0, **options: Any
    ) -> None:
        super().__init__(model, pool, **options)
        self._workers, self._runner = workers, runner
        self._changed_tables: list[tuple[int, list[int]]] = []
        self.tables.on_change = lambda row, block_ids: self._changed_tables.append((row, block_ids))

    def with_small_pool(self, num_tokens: int) -> ModelRunner:
        """As `ModelRunner.with_small_pool`; the last one is usable."""
        with self._workers.told(OpenRunner(_PROBE, num_tokens)):
            options = small_pool_options(self.pool, num_tokens)
            pool = ShardedPool(self.model.config, workers=self._workers, runner=_PROBE, **options)
        return ShardedRunner(
            self.model, pool, workers=self._workers, runner=_PROBE, max_num_seqs=1, max_context=num_tokens
        )

    def waits_by_layer(self, num_tokens: int) -> bool:
        """KV comes to all ranks at once, between their steps."""
        return False

    @torch.inference_mode()
    def compute(self, inputs: StepInputs, shape: StepShape, token_ids: Tensor | None = None) -> Tensor:
        """As `ModelRunner.compute`, on all ranks."""
        self.pool.land()
        changed, self._changed_tables = self._changed_tables, []
        step = RunStep(self._runner, inputs, shape, changed, has_token_ids=token_ids is not None)
        with self._workers.told(step):
            if token_ids is not None:
                dist.broadcast(token_ids := token_ids.contiguous(), src=0)
            return super().compute(inputs, shape, token_ids)


def gather_heads(own: Tensor, size: int) -> Tensor:
    """Rank 0: the KV of all heads, of which every rank brings its own."""
    parts = [torch.empty_like(own) for _ in range(size)] if dist.get_rank() == 0 else None
    dist.gather(own.contiguous(), parts, dst=0)
    return own if parts is None else torch.cat(parts, dim=_HEADS)


def scatter_heads(own: Tensor, parts: list[Tensor] | None = None) -> Tensor:
    """`own`, filled with this rank's heads of the KV that rank 0 has as `parts`."""
    dist.scatter(own, parts, src=0)
    return own
