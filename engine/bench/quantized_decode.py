"""Decode steps of whole quantised models, and their products alone, against the bytes that must be read.

The floor is what reading a token's weights takes, as they lie in the GGUF file, at the bandwidth that a
kernel reaches which only reads. The KV that a step reads is not in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dayshift.engine.bench.dummy_gguf import shape_named, write_gguf_shape
from dayshift.engine.bench.kernels import read_bandwidth, time_launches
from dayshift.engine.bench.serving import Prompts, measure_decode, warm_up
from dayshift.engine.bench.targets import EngineTarget
from dayshift.engine.config import EngineConfig
from dayshift.engine.engine import Engine
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.config import ModelConfig
from dayshift.engine.models.decoder import Decoder
from dayshift.engine.models.formats import load_model_config
from dayshift.engine.models.gguf_file import open_gguf
from dayshift.engine.models.quantized import PackedParts, QuantizedLinear, QuantizedMoe
from dayshift.engine.startup import StartupClock, StartupTimes
from dayshift.types import DayshiftError

_WARM_UP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedDecodeRow:
    """One model, one sequence."""

    shape: str
    context: int
    num_bytes: int  # that one token's weights take in the file
    floor_ms: float
    products_ms: float  # the quantised layers of a step and nothing else
    step_ms: float
    startup: StartupTimes

    @property
    def products_share(self) -> float:
        """Of the read bandwidth."""
        return self.floor_ms / self.products_ms

    @property
    def step_share(self) -> float:
        """Of the read bandwidth."""
        return self.floor_ms / self.step_ms


def measure_quantized_decode(
    shapes: Sequence[str], context: int, repeats: int
) -> Iterator[QuantizedDecodeRow]:
    """A row for each shape of `dummy_gguf`, with random weights.

    Raises DayshiftError for an unknown shape, and without a CUDA device.
    """
    found = [shape_named(name) for name in shapes]
    if not torch.cuda.is_available():
        raise DayshiftError("bench gguf: no CUDA device here; quantised weights stay so on one only")
    bandwidth = read_bandwidth()
    for name, shape in zip(shapes, found, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            path = write_gguf_shape(shape, Path(folder, f"{name}.gguf"))
            num_bytes, clock = bytes_of_token(path), StartupClock()
            with clock.running():
                engine = Engine(
                    EngineConfig(
                        model=str(path),
                        load_format="dummy",
                        num_kv_blocks=max(context, _WARM_UP_TOKENS) // 16 + 32,
                        max_num_seqs=1,
                        host_kv_bytes=1 << 20,
                        speculation="off",
                    )
                )
            startup = clock.times()
        target, prompts = EngineTarget(engine), Prompts(shape.config.vocab_size, seed=0)
        warm_up(target, prompts)
        (decode,) = measure_decode(target, prompts, [(1, context)], repeats, temperature=1.0)
        assert isinstance(engine.runner, ModelRunner)
        products = quantized_products(engine.runner.model)
        yield QuantizedDecodeRow(
            shape=name,
            context=context,
            num_bytes=num_bytes,
            floor_ms=num_bytes / bandwidth * 1e3,
            products_ms=time_launches([partial(_call_all, products)]) * 1e3,
            step_ms=decode.median_ms,
            startup=startup,
        )
        engine.close()
        del engine, target, products
        torch.cuda.empty_cache()


def bytes_of_token(path: Path) -> int:
    """Bytes of the weights in a GGUF file that one token is multiplied with: all but the embedding, unless
    it is the head as well, and of the experts those that are picked."""
    config, total = load_model_config(path), 0.0
    for name, tensor in open_gguf(path).tensors.items():
        if name == "token_embd.weight" and not config.tie_word_embeddings:
            continue
        total += tensor.raw.nbytes * _share_of_experts(name, config)
    return round(total)


def _share_of_experts(name: str, config: ModelConfig) -> float:
    if config.moe is None or "_exps." not in name:
        return 1.0
    return config.moe.num_experts_per_token / config.moe.num_experts


def quantized_products(model: Decoder) -> list[Callable[[], Tensor]]:
    """Every quantised layer for one token, in the order of a step; experts at random."""
    like, generator = model.embed.weight, torch.Generator().manual_seed(0)
    launches: list[Callable[[], Tensor]] = []
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            launches.append(partial(module, _inputs(module.parts, like)))
        elif isinstance(module, QuantizedMoe):
            num_picked = module.moe.num_experts_per_token
            picked = torch.randperm(module.moe.num_experts, generator=generator)[None, :num_picked]
            weights = torch.full((1, num_picked), 1 / num_picked, device=like.device)
            x = _inputs(module.gate_up, like)
            launches.append(partial(module.of_picks, x, weights, picked.to(like.device)))
    return launches


def _inputs(parts: PackedParts, like: Tensor) -> Tensor:
    return torch.randn(1, parts.matrices[0].num_columns, dtype=like.dtype, device=like.device)


def _call_all(launches: Sequence[Callable[[], object]]) -> None:
    for launch in launches:
        launch()
