"""What an engine computes with: a model on its device, with the KV pool that it fills.

Models that our decoder knows run on it; all others run on `transformers` (`models.fallback`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.config import EngineConfig
from dayshift.engine.model_runner import LaunchedLogits, ModelRunner
from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.fallback import FallbackPool, FallbackRunner, read_fallback_config
from dayshift.engine.models.formats import fallback_reason, load_model_config
from dayshift.engine.models.llama_cpp import load_llama_cpp_decoder
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.models.shard import WHOLE, Shard
from dayshift.engine.quant.kv import SCALE_BYTES
from dayshift.engine.startup import phase
from dayshift.engine.tensor_parallel.sharded import ShardedPool, ShardedRunner
from dayshift.engine.tensor_parallel.workers import Workers, start_workers
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
    `workers`: the other parts of a model that is spread over several devices.
    """

    model_config: ModelConfig
    dtype: torch.dtype
    pool: BlockPool
    runner: Runner
    max_context: int
    run_ahead: Callable[[Sequence[Context], Tensor], LaunchedLogits] | None = None
    has_drafts: bool = False
    workers: Workers | None = None

    def waits_by_layer(self, num_tokens: int) -> bool:
        """Whether a step of so many tokens takes KV from elsewhere as it comes, see `ModelRunner`."""
        return isinstance(self.runner, ModelRunner) and self.runner.waits_by_layer(num_tokens)

    @property
    def alarm(self) -> Connection | None:
        """Readable when `check` would raise; None: it never does."""
        return None if self.workers is None else self.workers.alarm

    def check(self) -> None:
        """Raise EngineDiedError if a part of the model has ended: what was computed since means nothing."""
        if self.workers is not None:
            self.workers.check()

    def close(self) -> None:
        """End the processes of the other parts of the model."""
        if self.workers is not None:
            self.workers.close()


def open_backend(config: EngineConfig, model: Path) -> Backend:
    """Load the model folder or GGUF file. Raises DayshiftError with the reason when it cannot run."""
    device, dtype = device_of(config), dtype_of(config)
    if config.deterministic:
        _check_deterministic(config, model)
    if config.arithmetic == "llama.cpp":
        _check_llama_cpp(config, model)
    if (reason := fallback_reason(model)) is not None:
        if config.tensor_parallel > 1:
            raise DayshiftError(f"tensor_parallel needs a model that runs on our own decoder, {reason}")
        if config.kv_cache_dtype != "auto":
            raise DayshiftError(
                f"kv_cache_dtype {config.kv_cache_dtype} needs a model that runs on our own decoder, {reason}"
            )
        return _open_fallback(config, model, dtype, device)
    if config.tensor_parallel > 1:
        runner, workers = _open_sharded(config, model, device)
    else:
        runner, workers = open_runner(config, model), None
    model_config = load_model_config(model)
    runs_ahead = device.type == "cuda" if config.run_ahead is None else config.run_ahead
    return Backend(
        model_config=model_config,
        dtype=dtype,
        pool=runner.pool,
        runner=runner,
        max_context=_max_context(model_config, runner.pool),
        run_ahead=runner.run_ahead if runs_ahead else None,
        has_drafts=config.speculation == "history",
        workers=workers,
    )


def open_runner(
    config: EngineConfig, model: Path, shard: Shard = WHOLE, workers: Workers | None = None
) -> ModelRunner:
    """Load a model, or a part of it, and make its KV pool. `workers` are the other parts', for rank 0."""
    device, dtype = device_of(config, shard.rank), dtype_of(config)
    model_config = shard.of(load_model_config(model))
    with phase("weights"):
        decoder = _load(config, model, model_config, dtype, device, shard)
    decoder.is_batch_invariant = config.deterministic
    _set_num_threads(config, decoder)
    num_blocks = config.num_kv_blocks or _num_kv_blocks(config, model_config, dtype, device)
    pool_options: dict[str, Any] = {
        "num_blocks": shard.smallest(num_blocks, device),
        "block_size": config.block_size,
        "dtype": dtype,
        "device": device,
        "kv_cache_dtype": config.kv_cache_dtype,
    }
    if workers is None:
        pool, runner_type = BlockPool(model_config, **pool_options), ModelRunner
    else:
        pool = ShardedPool(model_config, workers=workers, **pool_options)
        runner_type = partial(ShardedRunner, workers=workers)
    max_context = _max_context(model_config, pool)
    has_graphs = device.type == "cuda" and config.cuda_graphs
    return runner_type(
        decoder,
        pool,
        max_num_seqs=config.max_num_seqs,
        max_context=max_context,
        graph_context=min(max_context, 2 * config.window) if has_graphs else None,
    )


def _load(
    config: EngineConfig,
    model: Path,
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
) -> Decoder:
    if config.arithmetic == "llama.cpp":
        return load_llama_cpp_decoder(model, num_positions=model_config.max_positions)
    return load_decoder(
        model,
        dtype=dtype,
        device=device,
        num_positions=model_config.max_positions,
        load_format=config.load_format,
        seed=config.seed,
        keep_quantized=False if config.deterministic else None,  # their kernels choose by the batch
        shard=shard,
    )


def _open_sharded(config: EngineConfig, model: Path, device: torch.device) -> tuple[ModelRunner, Workers]:
    """The first part of a model, and the processes of the others."""
    if config.deterministic:
        raise DayshiftError("deterministic needs tensor_parallel 1: sums over devices depend on the batch")
    Shard(0, config.tensor_parallel).of(load_model_config(model))  # raises before a process is started
    workers = start_workers(config, model, device)
    try:
        with workers.explained():
            runner = open_runner(config, model, workers.shard, workers)
            workers.wait_until_ready()
            return runner, workers
    except BaseException:
        workers.close()
        raise


def _check_deterministic(config: EngineConfig, model: Path) -> None:
    """Raise DayshiftError for what would make output depend on more than the request."""
    if (reason := fallback_reason(model)) is not None:
        raise DayshiftError(f"deterministic needs a model that runs on our own decoder, {reason}")
    is_exact = config.kv_at_rest == "bf16" and dtype_of(config) == torch.bfloat16
    if config.kv_at_rest != "exact" and not is_exact:
        raise DayshiftError(
            f"deterministic with kv_at_rest {config.kv_at_rest}: a parked session would go on differently; "
            "use exact"
        )


def _check_llama_cpp(config: EngineConfig, model: Path) -> None:
    """Raise DayshiftError for what would give other bits than llama.cpp's, or others than the store's."""
    if (reason := fallback_reason(model)) is not None:
        raise DayshiftError(f"arithmetic llama.cpp needs a model that runs on our own decoder, {reason}")
    needed = {
        "device": (device_of(config).type, "cpu"),
        "dtype": (str(dtype_of(config)).removeprefix("torch."), "float32"),
        "load_format": (config.load_format, "auto"),
        "kv_cache_dtype": (config.kv_cache_dtype, "auto"),
        "speculation": (config.speculation, "off"),
        "tensor_parallel": (config.tensor_parallel, 1),
        "store_dir": (config.store_dir, None),
    }
    for name, (found, allowed) in needed.items():
        if found != allowed:
            raise DayshiftError(f"arithmetic llama.cpp needs {name} {allowed}, found {found}")


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


def device_of(config: EngineConfig, rank: int = 0) -> torch.device:
    """Where a part of the model is; on CUDA it becomes the current device. Raises DayshiftError."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise DayshiftError("device cuda was asked for, but no CUDA device is available; use cpu or auto")
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    last, num_devices = config.first_gpu + config.tensor_parallel - 1, torch.cuda.device_count()
    if last >= num_devices:
        raise DayshiftError(
            f"CUDA devices {config.first_gpu} to {last} were asked for, but there are {num_devices}, counted "
            "from 0; use fewer engines, or a smaller tensor_parallel"
        )
    torch.cuda.set_device(config.first_gpu + rank)  # where all that is allocated on "cuda" goes
    return torch.device("cuda")


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


def dtype_of(config: EngineConfig) -> torch.dtype:
    """What a model is computed in."""
    if config.dtype == "auto":
        is_cuda = config.device != "cpu" and torch.cuda.is_available()
        return torch.bfloat16 if is_cuda else torch.float32
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
