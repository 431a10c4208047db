"""The Triton kernels compile for every GPU generation that is supported, and fit its shared memory.

No GPU is needed: the launchers run on CPU tensors with their kernels replaced by recorders, and what
they launch is compiled by Triton and ptxas.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from dayshift.engine.kernels import (
    activation,
    attention,
    chunk_attention,
    decode_attention,
    norm,
    one_token_linear,
    rotary,
    tiled_linear,
)
from dayshift.engine.models.config import Activation

SHARED_MEMORY_BYTES = {89: 101_376, 90: 232_448, 100: 232_448}
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def overlap_options(capability: int) -> dict[str, bool]:
    """What `launch.overlap_options` gives on a GPU of this capability."""
    return {"OVERLAPS": True, "launch_pdl": True} if capability >= 90 else {"OVERLAPS": False}


class Recorder:
    """Stands in for a kernel; keeps what it is launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((args, kwargs))

    def compile(self, capability: int) -> Any:
        """Compile its only launch, specialised as at run time: tensors and multiples of 16 are aligned."""
        ((args, kwargs),) = self.launches
        names = self.kernel.arg_names
        signature = {name: _type_of(value) for name, value in zip(names, args, strict=False)}
        constants = {name: value for name, value in kwargs.items() if name in names}
        options = {name: value for name, value in kwargs.items() if name not in names}
        signature |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(
            self.kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(place,): [["tt.divisibility", 16]] for place, value in enumerate(args) if _is_aligned(value)},
        )
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{POINTERS[value.base.dtype][1:]}{value.block_shape}>"
    return {int: "i32", float: "fp32"}[type(value)]


KERNELS = {
    norm: ["_rms_norm"],
    activation: ["_gated_activation"],
    rotary: ["_rotate_token", "_store_token", "_rotate_store_token", "_norm_rotate_store_token"],
    chunk_attention: ["_attend_tile"],
    decode_attention: ["_attend_split", "_combine_splits"],
}


def launch_all(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    q = torch.empty(5, num_heads, head_dim, dtype=dtype)
    k = torch.empty(5, num_kv_heads, head_dim, dtype=dtype)
    pool = torch.empty(4, 16, num_kv_heads, head_dim, dtype=dtype)
    cos_sin, positions = torch.empty(64, head_dim), torch.zeros(5, dtype=torch.int64)
    lens, query_start = torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    tables = torch.zeros(2, 64, dtype=torch.int32)  # room for splits

    norm.rms_norm(q.flatten(1), q[0].flatten(), 1e-6, q.flatten(1))
    activation.silu_mul(q.flatten(1))
    rotary.rope(q, positions, cos_sin)
    rotary.store_kv(k, k, pool, pool, positions)
    rotary.rope_store_kv(q, k, k, positions, cos_sin, pool, pool, positions)
    sinks = None if window is None else torch.empty(num_heads, dtype=dtype)
    rotary.norm_rope_store_kv(q, k, k, q[0, 0], q[0, 0], 1e-6, positions, cos_sin, pool, pool, positions)
    attention.paged_attention(q, pool, pool, tables, lens, query_start, cos_sin, 0.1, sinks, window)


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
@pytest.mark.parametrize("num_tokens", [1, 16, 32])
@pytest.mark.parametrize("kind", [None, "silu"])
def test_linear_layers_compile(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: int,
    num_tokens: int,
    kind: Activation | None,
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    module, name = (
        (one_token_linear, "_multiply_token") if num_tokens == 1 else (tiled_linear, "_multiply_rows")
    )
    recorder = Recorder(getattr(module, name))
    x = torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
    weight = torch.empty(6144, 4096, dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, recorder)
        patch.setattr(module, "overlap_options", lambda _: overlap_options(capability))
        if num_tokens == 1:
            one_token_linear.multiply(x, weight, bias=weight[:, 0], residual=x, norm_weight=x[0], kind=kind)
        else:
            tiled_linear.multiply(x, weight, None if kind else weight[:, 0], kind)
    compiled = recorder.compile(capability)
    assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
    ptx = compiled.asm["ptx"]
    assert ("griddepcontrol.wait" in ptx) == (capability >= 90)
    assert ("cp.async" in ptx) == (num_tokens > 1)  # weights are on their way while others are multiplied
    assert ("wgmma.mma_async" in ptx) == (num_tokens > 1 and capability == 90)


@pytest.mark.parametrize(
    ("capability", "dtype", "heads", "window"),
    [
        (90, torch.bfloat16, (32, 4, 128), None),
        (90, torch.float32, (6, 2, 64), None),
        (90, torch.bfloat16, (64, 8, 64), 128),
        (90, torch.bfloat16, (8, 4, 256), 1024),
        (89, torch.bfloat16, (24, 8, 128), None),
        (100, torch.bfloat16, (64, 8, 64), 128),
    ],
)
def test_kernels_compile(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: int,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: int | None,
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorders: list[Recorder] = []
    with monkeypatch.context() as patch:
        for module, names in KERNELS.items():
            for name in names:
                recorders.append(Recorder(getattr(module, name)))
                patch.setattr(module, name, recorders[-1])
            if hasattr(module, "overlap_options"):
                patch.setattr(module, "overlap_options", lambda _: overlap_options(capability))
        launch_all(dtype, *heads, window)

    for recorder in recorders:
        compiled = recorder.compile(capability)
        assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
        assert compiled.asm["cubin"]


@pytest.mark.parametrize("num_tokens", [200, 4096])
def test_chunks_multiply_on_tensor_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_tokens: int):
    """In small steps, whose keys may be in splits, and in large ones, where they are not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorder = Recorder(chunk_attention._attend_tile)
    q = torch.empty(num_tokens, 32, 128, dtype=torch.bfloat16)
    pool = torch.empty(4, 16, 4, 128, dtype=torch.bfloat16)
    tables, cos_sin = torch.zeros(1, 512, dtype=torch.int32), torch.empty(8192, 128)
    lens, query_start = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(chunk_attention, "_attend_tile", recorder)
        attention.paged_attention(q, pool, pool, tables, lens, query_start, cos_sin, 0.1)
    ptx = recorder.compile(90).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx  # the next keys are on their way
    assert ("atom.global" in ptx) == (num_tokens == 200)
