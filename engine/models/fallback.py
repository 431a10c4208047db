"""Any causal language model of `transformers`, where our decoder does not know the architecture.

It serves the same requests, one sequence after the other and with `transformers`' own KV cache, so
it is slower; its keys cannot be parked, recalled or compacted, so it has no sessions.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.models.config import ModelConfig
from dayshift.types import DayshiftError

if TYPE_CHECKING:  # seconds that engines with our decoder do not wait for
    from transformers import DynamicCache, PretrainedConfig

logger = logging.getLogger(__name__)


def read_fallback_config(folder: Path) -> ModelConfig:
    """The model's shape as far as `transformers` knows it. Raises DayshiftError where it does not."""
    from transformers import AutoConfig

    try:
        outer = AutoConfig.from_pretrained(folder)
    except (ValueError, KeyError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise DayshiftError(
            f"{folder}: neither our decoder nor transformers knows this model: {reason}"
        ) from error
    config = outer.get_text_config()
    num_heads = _number(config, "num_attention_heads", 1)
    return ModelConfig(
        model_type=outer.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=_number(config, "intermediate_size", 4 * config.hidden_size),
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=_number(config, "num_key_value_heads", num_heads),
        head_dim=_number(config, "head_dim", config.hidden_size // num_heads),
        max_positions=_number(config, "max_position_embeddings", 2048),
        rms_norm_eps=0.0,
        rope_theta=0.0,
        rope_scaling=None,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        has_qkv_bias=False,
        has_qk_norm=False,
    )


class FallbackPool(BlockPool):
    """Counts blocks as `BlockPool` does, so that memory stays bounded; keeps caches instead of blocks."""

    def __init__(
        self, config: ModelConfig, *, num_blocks: int, block_size: int, device: torch.device
    ) -> None:
        no_layers = replace(config, num_layers=0)
        super().__init__(
            no_layers, num_blocks=num_blocks, block_size=block_size, dtype=torch.float32, device=device
        )
        self.caches: dict[int, DynamicCache] = {}  # by the id of a context that holds blocks

    def release(self, context: Context) -> None:
        """As `BlockPool.release`; forgets the context's cache."""
        self.caches.pop(id(context), None)
        super().release(context)


class FallbackRunner:
    """Runs a model of `transformers` on a step's chunks, see `ModelRunner.run`.

    Raises DayshiftError for a model that cannot be loaded or keeps no KV cache.
    """

    def __init__(self, folder: Path, pool: FallbackPool, *, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self.pool = pool
        self.device = device
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (ValueError, KeyError, OSError) as error:
            raise DayshiftError(
                f"{folder}: transformers cannot load it: {str(error).splitlines()[0]}"
            ) from error
        self._accepted = inspect.signature(model.forward).parameters.keys()
        if "past_key_values" not in self._accepted:
            raise DayshiftError(
                f"{folder}: {type(model).__name__} keeps no KV cache, which the fallback needs"
            )
        self.model = model.to(device).eval()
        logger.warning(
            "%s runs on the transformers fallback: slower than our decoder, and without sessions",
            type(model).__name__,
        )

    @torch.inference_mode()
    def run(self, chunks: Seq[Chunk]) -> Tensor:
        """Float32 logits (num_sampled, vocab_size) of the chunks that need sampling, in order."""
        rows = [logits for chunk in chunks if (logits := self._run_chunk(chunk)) is not None]
        if not rows:
            return torch.empty(0, self.model.config.get_text_config().vocab_size, device=self.device)
        return torch.stack(rows)

    def _run_chunk(self, chunk: Chunk) -> Tensor | None:
        from transformers import DynamicCache

        context = chunk.context
        if context.num_computed == 0:
            self.pool.caches[id(context)] = DynamicCache(config=self.model.config)
        start, end = context.num_computed, context.num_computed + chunk.num_tokens
        options = {
            "position_ids": torch.arange(start, end, device=self.device).unsqueeze(0),
            "logits_to_keep": 1,
        }
        out = self.model(
            input_ids=torch.tensor([context.token_ids[start:end]], device=self.device),
            past_key_values=self.pool.caches[id(context)],
            use_cache=True,
            **{name: value for name, value in options.items() if name in self._accepted},
        )
        context.num_computed = end
        return out.logits[0, -1].float() if chunk.needs_sampling else None


def _number(config: PretrainedConfig, name: str, default: int) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else default
