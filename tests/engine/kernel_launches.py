"""Every Triton kernel of the product: what the source launches, and launches at the sizes of models.

Tensors are on the CPU and are never touched: `compiled_kernels` makes compilations of the launches.
"""

# A launch takes numbers where the kernel's parameters are annotated constexpr.
# pyright: reportArgumentType=false

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Q
from torch import Tensor
from triton import JITFunction

from dayshift.engine.bench import kernels as bench_kernels
from dayshift.engine.kernels import (
    activation,
    attention,
    embedding,
    expert_tiles,
    few_token_experts,
    invariant,
    norm,
    one_token_linear,
    one_token_stream,
    quantized,
    rotary,
    routing,
    sampling,
    step_placement,
    tiled_experts,
    tiled_linear,
    token_attention,
)
from dayshift.engine.models.config import Activation
from dayshift.engine.quant.kv import POOL_DTYPES, SCALE_BYTES
from dayshift.engine.quant.packed import PackedMatrix, pack
from dayshift.policy.smolvla import attention as smolvla_attention
from dayshift.policy.smolvla import heads, images, layer_norm, row_norm
from dayshift.policy.smolvla.config import PatchShape

ROOT = Path(__file__).parents[2]
Launches = dict[str, Callable[[], object]]


def kernel_name(kernel: JITFunction[Any]) -> str:
    """As `engine.kernels.norm._rms_norm`: two modules may have kernels of one name."""
    return f"{kernel.fn.__module__.removeprefix('dayshift.')}.{kernel.fn.__name__}"


def launched_in_source() -> set[str]:
    """Names of all kernels that the source launches, `kernel[grid](...)`."""
    names: set[str] = set()
    for path, tree in _sources_with_triton():
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = importlib.import_module(".".join(("dayshift", *parts)))
        calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        called = [_value_of(func.value, module) for func in calls if isinstance(func, ast.Subscript)]
        names |= {kernel_name(kernel) for kernel in called if isinstance(kernel, JITFunction)}
    return names


def asking_for_a_gpu() -> set[str]:
    """Names of the functions beside kernels that compare a device's type, `device.type == "cuda"`."""
    return {
        function.name
        for _, tree in _sources_with_triton()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "type"
    }


def _sources_with_triton() -> Iterator[tuple[Path, ast.Module]]:
    for path in [*ROOT.glob("engine/**/*.py"), *ROOT.glob("policy/**/*.py")]:
        text = path.read_text()
        if "import triton" in text:
            yield path, ast.parse(text)


def _value_of(node: ast.expr, module: ModuleType) -> Any:
    """What `name` or `name.attribute` is in a module; None for anything else."""
    if isinstance(node, ast.Name):
        return getattr(module, node.id, None)
    if isinstance(node, ast.Attribute):
        return getattr(_value_of(node.value, module), node.attr, None)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model that choose its kernels and their constants."""

    dtype: torch.dtype = torch.bfloat16
    hidden: int
    inner: int  # of an expert, or of a dense MLP
    heads: tuple[int, int, int]  # of queries, of keys, and their size
    num_experts: int = 0  # a dense model
    num_picked: int = 0
    vocab_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    has_sinks: bool = False
    window: int | None = None  # of some layers
    quant_type: Q

    def empty(self, *sizes: int) -> Tensor:
        """A tensor of the model's dtype."""
        return torch.empty(sizes, dtype=self.dtype)


QWEN3_30B_A3B = Shape(
    hidden=2048,
    inner=768,
    heads=(32, 4, 128),
    num_experts=128,
    num_picked=8,
    vocab_size=151_936,
    quant_type=Q.Q3_K,
)
GPT_OSS_20B = Shape(
    hidden=2880,
    inner=2880,
    heads=(64, 8, 64),
    num_experts=32,
    num_picked=4,
    vocab_size=201_088,
    activation="clamped_swiglu",
    has_bias=True,
    has_sinks=True,
    window=128,
    quant_type=Q.MXFP4,
)
LLAMA_3_1_8B = Shape(hidden=4096, inner=14_336, heads=(32, 8, 128), vocab_size=128_256, quant_type=Q.Q4_K)
GEMMA_3_4B = Shape(
    hidden=2560,
    inner=10_240,
    heads=(8, 4, 256),
    vocab_size=262_208,
    activation="gelu_tanh",
    window=1024,
    quant_type=Q.Q8_0,
)
PLANNER = Shape(hidden=320, inner=640, heads=(6, 2, 64), vocab_size=1024, quant_type=Q.Q5_0)
SMALL = Shape(
    dtype=torch.float32,
    hidden=64,
    inner=48,
    heads=(4, 2, 16),
    num_experts=8,
    num_picked=3,
    vocab_size=512,
    quant_type=Q.Q6_K,
)
SHAPES = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "llama-3.1-8b": LLAMA_3_1_8B,
    "gemma-3-4b": GEMMA_3_4B,
    "planner": PLANNER,
    "small, float32": SMALL,
    "small, float16": replace(SMALL, dtype=torch.float16),
}


def launches(shape: Shape) -> Launches:
    """Calls that launch every kernel that models of this shape take, by what they do."""
    return {
        "place, 8 decodes": _place(8, 8),
        "place, a chunk": _place(200, 1),
        "embed": lambda: embedding.embed(shape.empty(9, shape.hidden), torch.zeros(8, dtype=torch.int64)),
        **_dense_launches(shape),
        **_rotary_launches(shape),
        **dict(_attention_launches(shape)),
        **(_expert_launches(shape) if shape.num_experts else {}),
        **packed_launches(shape.quant_type, shape.dtype),
        "attention with rotation and store, 1 decode": _attend_at_once(shape, 1),
        "attention with rotation and store, 4 decodes": _attend_at_once(shape, 4),
        "packed qkv, attention, o, 1 token": _token_attention(shape),
        "draw": lambda: sampling.draw_by_race(
            torch.empty(8, shape.vocab_size), torch.ones(8), torch.zeros(8, dtype=torch.int64)
        ),
        "largest": lambda: sampling.largest(torch.empty(8, shape.vocab_size)),
        "read, for the bench": _read,
        **policy_launches(),
    }


def packed_launches(quant_type: Q, dtype: torch.dtype) -> Launches:
    """Of layers with quantised matrices."""
    matrix, experts = _packed(quant_type, 64, 2048), _packed(quant_type, 4, 64, 2048)
    down = _packed(Q.Q8_0, 4, 2048, 32)
    x, picks = torch.empty(4, 2048, dtype=dtype), torch.zeros(4, 8, dtype=torch.int64)
    biases = {"gate_up_bias": torch.empty(4, 64, dtype=dtype), "down_bias": torch.empty(4, 2048, dtype=dtype)}
    normed = x[:1], x[:1], x[0], 1e-6, (matrix,)
    return {
        "packed linear, 1 token": lambda: quantized.quantized_linear(x[:1], (matrix,)),
        "packed linear, 4 tokens": lambda: quantized.quantized_linear(x, (matrix,)),
        "norm, packed linear": lambda: quantized.quantized_norm_linear(*normed, x[0, :64]),
        "norm, gated packed linear": lambda: quantized.quantized_norm_gated_linear(*normed, "silu"),
        "packed experts": lambda: quantized.quantized_moe(
            x, torch.empty(picks.shape), picks, (experts,), down, activation="silu", **biases
        ),
        "unpack": lambda: quantized.dequantize_packed(matrix, dtype),
    }


def _token_attention(shape: Shape) -> Callable[[], object]:
    """The attention of one token, between quantised projections; v in another type than q and k."""
    num_heads, num_kv_heads, head_dim = _heads_at_once(shape)
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    x = shape.empty(1, 2048)
    qk = _packed(shape.quant_type, (num_heads + num_kv_heads) * head_dim, 2048)
    v = _packed(Q.Q6_K, num_kv_heads * head_dim, 2048)
    o = _packed(Q.Q4_0, 64, num_heads * head_dim)
    heads, place = _place_at_once(shape, 1)

    def launch() -> None:
        qkv = quantized.quantized_linear(x, (qk, v)).view(1, -1, head_dim)
        q, k, values = qkv.split(sizes, dim=1)
        points = token_attention.attend_to_points(q, k, values, heads, *place)
        quantized.products(points, x, (o,), None)

    return launch


def _attend_at_once(shape: Shape, num_tokens: int) -> Callable[[], object]:
    """The same between projections that are not quantised."""
    num_heads, num_kv_heads, head_dim = _heads_at_once(shape)
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = shape.empty(num_tokens, sum(sizes), head_dim).split(sizes, dim=1)
    heads, place = _place_at_once(shape, num_tokens)
    return lambda: token_attention.attend(q, k, v, heads, *place)


def _heads_at_once(shape: Shape) -> tuple[int, int, int]:
    """The shape's heads, of a size that is attended to in one launch."""
    return (*shape.heads[:2], min(max(shape.heads[2], 64), 128))


def _place_at_once(shape: Shape, num_tokens: int) -> tuple[token_attention.Heads, tuple[Tensor, ...]]:
    """What a launch takes beside queries, keys and values."""
    num_heads, num_kv_heads, head_dim = _heads_at_once(shape)
    pool, factors = shape.empty(4, 16, num_kv_heads, head_dim), shape.empty(head_dim)
    slots, tables = (
        torch.zeros(num_tokens, dtype=torch.int64),
        torch.zeros(num_tokens, 128, dtype=torch.int32),
    )
    sinks = shape.empty(num_heads) if shape.has_sinks else None
    heads = token_attention.Heads(
        scale=0.1, window=shape.window, sinks=sinks, norms=(factors, factors), eps=1e-6
    )
    return heads, (pool, pool, slots, tables, tables[:, 0], torch.empty(8192, head_dim))


def _packed(quant_type: Q, *shape: int) -> PackedMatrix:
    block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
    raw = torch.zeros(*shape[:-1], shape[-1] // block_size * block_bytes, dtype=torch.uint8)
    return pack(raw, quant_type)


def _place(num_tokens: int, num_seqs: int) -> Callable[[], object]:
    rows, starts = torch.zeros(2, num_seqs, dtype=torch.int64)
    query_start = torch.zeros(num_seqs + 1, dtype=torch.int64)
    tables = torch.zeros(129, 512, dtype=torch.int32)
    return lambda: step_placement.place_step(rows, starts, query_start, tables, num_tokens, 128, 16)


def _read() -> None:
    data = torch.zeros(16, dtype=torch.int32)
    bench_kernels._read[(1,)](data, data, 16, BLOCK=4096)


def _attend(num_robots: int, num_open: int = 250) -> None:
    """With the tile for so many."""
    q = torch.empty(num_robots, 15, 50, 64, dtype=torch.bfloat16)
    keys, values = torch.empty(2, num_robots, 5, 300, 64, dtype=q.dtype)
    mask = smolvla_attention.KeyMask(scores=torch.empty(num_robots, 300), num_open=num_open, dense=None)
    smolvla_attention.attend_triton(q, keys, values, mask)


def policy_launches() -> Launches:
    """Of SmolVLA, in a step of two robots."""
    rows = torch.empty(2, 50, 25 * 64, dtype=torch.bfloat16)
    keys, values = torch.empty(2, 2, 5, 300, 64, dtype=rows.dtype)
    angles, slots = torch.empty(2, 1, 50, 32), heads.KVSlots(keys[:, :, 200:250], values[:, :, 200:250])
    factors, cut = torch.empty(25 * 64, dtype=rows.dtype), PatchShape(side=512, patch=16)
    pixels, fields = torch.empty(4 * 256 * 256 * 3, dtype=torch.uint8), torch.empty(4, 6, dtype=torch.int64)
    patches = torch.empty((4, *cut.of_image), dtype=rows.dtype)
    return {
        "policy, place heads": lambda: heads.place_heads_triton(
            rows, heads.Rotary(angles, angles), 15, slots, None
        ),
        "policy, place heads of rows to be normed": lambda: heads.place_heads_triton(
            rows, heads.Rotary(angles, angles), 15, slots, row_norm.RowNorm(rows[..., :720], 1e-5)
        ),
        "policy, gate rows to be normed": lambda: row_norm.gate_rows_triton(
            rows, row_norm.RowNorm(rows[..., :720], 1e-5)
        ),
        "policy, attention, 2 robots": lambda: _attend(2),
        "policy, attention, 8 robots": lambda: _attend(8),
        "policy, attention, 32 robots": lambda: _attend(32),
        "policy, attention to a prefix alone": lambda: _attend(32, num_open=300),
        "policy, layer norm": lambda: layer_norm.offset_layer_norm_triton(
            rows, factors.float(), factors, factors, 1e-6
        ),
        "policy, images": lambda: images.patches_triton(pixels, fields, torch.empty(4, 2, 3), cut, patches),
    }


def _dense_launches(shape: Shape) -> Launches:
    """Norms, linear layers and activations."""
    x, kind = shape.empty(16, shape.hidden), shape.activation
    num_heads, num_kv_heads, head_dim = shape.heads
    weight = shape.empty((num_heads + 2 * num_kv_heads) * head_dim, shape.hidden)
    gate_up = shape.empty(2 * shape.inner, shape.hidden)
    bias = weight[:, 0].contiguous() if shape.has_bias else None
    normed = {"residual": x[:1], "norm_weight": x[0], "eps": 1e-6}
    return {
        "norm": lambda: norm.rms_norm(x[:8], x[0], 1e-6, x[:8]),
        "norm, no residual": lambda: norm.rms_norm(x[:8], x[0], 1e-6),
        "gated activation": lambda: activation.gated_activation(x, kind),
        "linear, 1 token": lambda: one_token_linear.multiply(x[:1], weight, bias=bias),
        "norm, linear, 1 token": lambda: one_token_linear.multiply(x[:1], weight, bias=bias, **normed),
        "norm, gated linear, 1 token": lambda: one_token_linear.multiply(x[:1], gate_up, kind=kind, **normed),
        "linear, 1 token, streamed": lambda: one_token_stream.multiply(x[:1], weight, bias=bias),
        "norm, gated linear, 1 token, streamed": lambda: one_token_stream.multiply(
            x[:1], gate_up, kind=kind, **normed
        ),
        "linear, 16 tokens": lambda: tiled_linear.multiply(x, weight, bias),
        "gated linear, 16 tokens": lambda: tiled_linear.multiply(x, gate_up, kind=kind),
        "linear, batch-invariant": lambda: invariant.linear(x, weight, bias),
    }


def _rotary_launches(shape: Shape) -> Launches:
    """Rotations, and stores of keys and values."""
    num_heads, num_kv_heads, head_dim = shape.heads
    qkv = shape.empty(8, num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    factors, cos_sin = shape.empty(head_dim), torch.empty(8192, head_dim)
    positions, slots = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)

    def stores(pool: Tensor, suffix: str) -> Launches:
        place = (positions, cos_sin, pool, pool, slots)
        return {
            f"store KV{suffix}": lambda: rotary.store_kv(k, v, pool, pool, slots),
            f"rotate, store KV{suffix}": lambda: rotary.rope_store_kv(q, k, v, *place),
            f"norm, rotate, store KV{suffix}": lambda: rotary.norm_rope_store_kv(
                q, k, v, factors, factors, 1e-6, *place
            ),
        }

    return {
        "norm of heads": lambda: norm.rms_norm(q, factors, 1e-6),
        "rotate": lambda: rotary.rope(q, positions, cos_sin),
        **stores(shape.empty(4, 16, num_kv_heads, head_dim), ""),
        **stores(_quantized_pool(shape, "int8"), ", int8"),
        **stores(_quantized_pool(shape, "fp8"), ", fp8"),
    }


def _quantized_pool(shape: Shape, kind: str) -> Tensor:
    _, num_kv_heads, head_dim = shape.heads
    return torch.zeros(4, 16, num_kv_heads, head_dim + SCALE_BYTES, dtype=POOL_DTYPES[kind])


def _attention_launches(shape: Shape) -> Iterator[tuple[str, Callable[[], object]]]:
    """Of layers with and without a window, over contexts of up to 8,192 tokens."""
    num_heads, num_kv_heads, head_dim = shape.heads
    pool, cos_sin = shape.empty(4, 16, num_kv_heads, head_dim), torch.empty(8192, head_dim)
    sinks = shape.empty(num_heads) if shape.has_sinks else None

    def attend(
        op: Callable[..., Any], num_tokens: int, num_seqs: int, window: int | None, pool: Tensor = pool
    ) -> Any:
        tables, lens = torch.zeros(num_seqs, 512, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
        starts, q = torch.zeros(num_seqs + 1, dtype=torch.int32), shape.empty(num_tokens, num_heads, head_dim)
        return lambda: op(q, pool, pool, tables, lens, starts, cos_sin, 0.1, sinks, window)

    for window in dict.fromkeys((None, shape.window)):
        suffix = "" if window is None else f", window of {window}"
        yield f"attention, 1 decode{suffix}", attend(attention.paged_attention, 1, 1, window)
        yield f"attention, 8 decodes{suffix}", attend(attention.paged_attention, 8, 8, window)
        yield f"attention, 100 decodes{suffix}", attend(attention.paged_attention, 100, 100, window)
        yield f"attention, a chunk{suffix}", attend(attention.paged_attention, 200, 1, window)
        yield f"attention, 4,096 tokens{suffix}", attend(attention.paged_attention, 4096, 1, window)
        yield f"attention, batch-invariant{suffix}", attend(invariant.paged_attention, 200, 1, window)
    for kind in POOL_DTYPES:
        quantized = _quantized_pool(shape, kind)
        yield f"attention, 8 decodes, {kind}", attend(attention.paged_attention, 8, 8, None, quantized)
        yield f"attention, a chunk, {kind}", attend(attention.paged_attention, 200, 1, None, quantized)
        yield (
            f"attention, batch-invariant, {kind}",
            attend(invariant.paged_attention, 200, 1, None, quantized),
        )


def _expert_launches(shape: Shape) -> Launches:
    """Routers and experts."""
    hidden, inner, num_experts = shape.hidden, shape.inner, shape.num_experts
    x, router = shape.empty(4096, hidden), shape.empty(num_experts, hidden)
    experts = shape.empty(num_experts, 2 * inner, hidden), shape.empty(num_experts, hidden, inner)
    router_bias, *biases = (t[..., 0] if shape.has_bias else None for t in (router, *experts))
    options = dict(zip(("gate_up_bias", "down_bias"), biases, strict=True), activation=shape.activation)

    def mix(op: Callable[..., Any], num_tokens: int) -> Callable[[], object]:
        picked = torch.zeros(num_tokens, shape.num_picked, dtype=torch.int64)
        weights = torch.empty(picked.shape)
        return lambda: op(x[:num_tokens], weights, picked, *experts, **options)

    return {
        "router with norm": lambda: routing.norm_router(x[:4], x[:4], x[0], 1e-6, router, router_bias),
        "picks": lambda: routing.route_top_k(shape.empty(8, num_experts), shape.num_picked, True),
        "pairs of 5,000 tokens, 8 of each": lambda: expert_tiles.tile_experts(
            torch.zeros(5000, 8, dtype=torch.int64), num_experts, 128
        ),
        "experts, 1 token": mix(few_token_experts.moe_mlp, 1),
        "experts, 40 tokens": mix(tiled_experts.moe_mlp, 40),
        "experts, 4,096 tokens": mix(tiled_experts.moe_mlp, 4096),
        "experts, batch-invariant": mix(invariant.moe_mlp, 40),
    }
