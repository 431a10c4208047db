"""What an engine computes with: a model on its device, with the KV pool that it fills.

Models that our decoder knows run on it; all others run on `transformers` (`models.fallback`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.config import EngineConfig
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.fallback import FallbackPool, FallbackRunner, read_fallback_config
from dayshift.engine.models.formats import fallback_reason, load_model_config
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.quant.kv import SCALE_BYTES
from dayshift.types import DayshiftError

_CPU_KV_BYTES = 1 << 30
_SMALL_MODEL = 100_000_000  # parameters
_GPU_MEMORY_SHARE = 0.85


class Runner(Protocol):
    """Runs a model on a step's chunks."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """See `ModelRunner.run`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A model that is ready to run. `max_context`: tokens that a context can have at most.

    `run_ahead` launches one more token of each context from token ids on the device, see
    `ModelRunner.run_ahead`; None where that gains nothing, because the host computes.
    `has_drafts`: speculation is asked for, and chunks may have drafts.
    """

    model_config: ModelConfig
    dtype: torch.dtype
    pool: BlockPool
    runner: Runner
    max_context: int
    run_ahead: Callable[[Sequence[Context], Tensor], Tensor] | None = None
    has_drafts: bool = False


def open_backend(config: EngineConfig, model: Path) -> Backend:
    """Load the model folder or GGUF file. Raises DayshiftError with the reason when it cannot run."""
    device, dtype = _device(config), _dtype(config)
    if config.kv_cache_dtype != "auto" and device.type == "cuda":
        raise DayshiftError(f"kv_cache_dtype {config.kv_cache_dtype} runs on a CPU only; on CUDA use auto")
    if config.deterministic:
        _check_deterministic(config, model)
    if fallback_reason(model) is not None:
        return _open_fallback(config, model, dtype, device)
    model_config = load_model_config(model)
    decoder = load_decoder(
        model,
        dtype=dtype,
        device=device,
        num_positions=model_config.max_positions,
        load_format=config.load_format,
        seed=config.seed,
        keep_quantized=False if config.deterministic else None,  # their kernels choose by the batch
    )
    decoder.is_batch_invariant = config.deterministic
    _set_num_threads(config, decoder)
    pool = BlockPool(
        model_config,
        num_blocks=config.num_kv_blocks or _num_kv_blocks(config, model_config, dtype, device),
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    max_context = _max_context(model_config, pool)
    has_graphs = device.type == "cuda" and config.cuda_graphs
    runner = ModelRunner(
        decoder,
        pool,
        max_num_seqs=config.max_num_seqs,
        max_context=max_context,
        graph_context=min(max_context, 2 * config.window) if has_graphs else None,
    )
    runs_ahead = device.type == "cuda" if config.run_ahead is None else config.run_ahead
    return Backend(
        model_config=model_config,
        dtype=dtype,
        pool=pool,
        runner=runner,
        max_context=max_context,
        run_ahead=runner.run_ahead if runs_ahead else None,
        has_drafts=config.speculation == "history",
    )


def _check_deterministic(config: EngineConfig, model: Path) -> None:
    """Raise DayshiftError for what would make output depend on more than the request."""
    if (reason := fallback_reason(model)) is not None:
        raise DayshiftError(f"deterministic needs a model that runs on our own decoder, {reason}")
    is_exact = config.kv_at_rest == "bf16" and _dtype(config) == torch.bfloat16
    if config.kv_at_rest != "exact" and not is_exact:
        raise DayshiftError(
            f"deterministic with kv_at_rest {config.kv_at_rest}: a parked session would go on differently; "
            "use exact"
        )


def _open_fallback(config: EngineConfig, model: Path, dtype: torch.dtype, device: torch.device) -> Backend:
    model_config = read_fallback_config(model)
    num_blocks = config.num_kv_blocks or _num_kv_blocks(config, model_config, dtype, device)
    pool = FallbackPool(model_config, num_blocks=num_blocks, block_size=config.block_size, device=device)
    return Backend(
        model_config=model_config,
        dtype=dtype,
        pool=pool,
        runner=FallbackRunner(model, pool, dtype=dtype, device=device),
        max_context=_max_context(model_config, pool),
    )


def _max_context(model: ModelConfig, pool: BlockPool) -> int:
    return min(model.max_positions, pool.num_blocks * pool.block_size)


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DayshiftError("device cuda was asked for, but no CUDA device is available; use cpu or auto")
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(config.device)


def _set_num_threads(config: EngineConfig, model: Decoder) -> None:
    """A step of a small model is over before a second thread has woken: on two busy cores one thread
    took 10 ms for a token, two took 250 ms, most of it in waiting for each other.

    Torch's threads are the process's, so an engine inside a larger program sets them for it too.
    """
    if model.embed.weight.device.type != "cpu":
        return
    is_small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL_MODEL
    if config.num_threads is not None or is_small:
        torch.set_num_threads(config.num_threads or 1)


def _dtype(config: EngineConfig) -> torch.dtype:
    if config.dtype == "auto":
        return torch.float32 if _device(config).type == "cpu" else torch.bfloat16
    return getattr(torch, config.dtype)


def _num_kv_blocks(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    num_bytes = config.kv_cache_bytes
    if num_bytes is None and device.type == "cuda":
        num_bytes = int(torch.cuda.mem_get_info(device)[0] * _GPU_MEMORY_SHARE)
    block_bytes = _kv_bytes_per_token(config, model, dtype) * config.block_size
    num_blocks = (num_bytes or _CPU_KV_BYTES) // block_bytes
    if num_blocks == 0:
        raise DayshiftError(f"kv_cache_bytes {num_bytes} is less than one KV block of {block_bytes} bytes")
    return num_blocks


def _kv_bytes_per_token(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    if config.kv_cache_dtype == "auto":
        return model.kv_bytes_per_token(dtype.itemsize)
    return 2 * model.num_layers * model.num_kv_heads * (model.head_dim + SCALE_BYTES)
