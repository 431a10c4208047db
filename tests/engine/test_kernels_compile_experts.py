"""As `test_kernels_compile`, for routing, experts and sampling."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dayshift.engine.kernels import few_token_experts, routing, sampling, tiled_experts
from tests.engine.test_kernels_compile import SHARED_MEMORY_BYTES, Recorder, overlap_options

NUM_EXPERTS, HIDDEN, INNER = 4, 2048, 768
TOUCHES = r"st\.global|cp\.async|\batom\b|\bred\."


def record(
    patch: pytest.MonkeyPatch, capability: int, kernels: dict[ModuleType, list[str]]
) -> list[Recorder]:
    """Recorders in the place of the named kernels, whose launchers see a GPU of this capability."""
    recorders: list[Recorder] = []
    for module, names in kernels.items():
        for name in names:
            recorders.append(Recorder(getattr(module, name)))
            patch.setattr(module, name, recorders[-1])
        if hasattr(module, "overlap_options"):
            patch.setattr(module, "overlap_options", lambda _: overlap_options(capability))
        if hasattr(module, "shared_memory_bytes"):
            patch.setattr(module, "shared_memory_bytes", lambda _: SHARED_MEMORY_BYTES[capability])
    return recorders


def assert_waits(ptx: str, capability: int) -> None:
    """Where kernels overlap, this one touches nothing before it has waited for the one in front."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    assert bool(wait) == (capability >= 90)
    assert not wait or not re.search(rf"{TOUCHES}|ld\.global", before)


def make_args(num_tokens: int, num_picked: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(num_tokens, HIDDEN, dtype=dtype),
        torch.empty(num_tokens, num_picked),
        torch.zeros(num_tokens, num_picked, dtype=torch.int64),
        torch.empty(NUM_EXPERTS, 2 * INNER, HIDDEN, dtype=dtype),
        torch.empty(NUM_EXPERTS, HIDDEN, INNER, dtype=dtype),
    )


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [8, 40, 400])  # one for each tiling
def test_tiles_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, dtype: torch.dtype, num_tokens: int
):
    if dtype == torch.float32 and (capability, num_tokens) != (90, 8):
        pytest.skip("large tiles without tensor cores: correct, but slow to compile")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = {routing: ["_tile_expert"], tiled_experts: ["_gate_up_tile", "_down_tile", "_sum_picks"]}
    with monkeypatch.context() as patch:
        recorders = record(patch, capability, names)
        tiled_experts.moe_mlp(*make_args(num_tokens, 2, dtype))
    for recorder in recorders:
        compiled = recorder.compile(capability)
        assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
        ptx = compiled.asm["ptx"]
        assert_waits(ptx, capability)
        if recorder.kernel.__name__.endswith("_tile"):
            assert ("cp.async.bulk.tensor" in ptx) == (capability >= 90)
            assert ("wgmma.mma_async" in ptx) == (capability == 90 and dtype == torch.bfloat16)
            assert ".local" not in ptx


@pytest.mark.parametrize("capability", SHARED_MEMORY_BYTES)
def test_routing_and_few_tokens_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    names = {
        routing: ["_norm_router", "_route_token"],
        few_token_experts: ["_pick_gate_up", "_picks_down"],
        sampling: ["_race_part", "_race_winners"],
    }
    with monkeypatch.context() as patch:
        recorders = record(patch, capability, names)
        x, *rest = make_args(1, 8, torch.bfloat16)
        routing.norm_router(x, x, x[0], 1e-6, torch.empty(128, HIDDEN, dtype=x.dtype))
        routing.route_top_k(torch.empty(1, 128, dtype=x.dtype), 8, True)
        few_token_experts.moe_mlp(x, *rest)
        sampling.draw_by_race(torch.empty(2, 151936), torch.ones(2), torch.zeros(2, dtype=torch.int64))
    for recorder in recorders:
        compiled = recorder.compile(capability)
        assert compiled.metadata.shared <= SHARED_MEMORY_BYTES[capability]
        name, ptx = recorder.kernel.__name__, compiled.asm["ptx"]
        if name.startswith("_pick"):
            assert "ld.global.v4.b32" in ptx  # 16 bytes a thread
        if capability >= 90 and name == "_norm_router":
            before, _, _ = ptx.partition("griddepcontrol.wait")
            assert 4 <= len(re.findall(r"ld\.global", before)) <= 16  # weights only
            assert not re.search(TOUCHES, before)
        elif capability >= 90 and name == "_picks_down":
            before, _, _ = ptx.partition("griddepcontrol.wait")
            assert len(re.findall(r"ld\.global\S*", before)) <= 4  # the picks, and their weights
            assert not re.search(TOUCHES, before)
        elif name == "_pick_gate_up":
            # `_picks_down` reads the picks without a wait of its own: this kernel has waited for them.
            assert "griddepcontrol.launch_dependents" not in ptx.partition("griddepcontrol.wait")[0]
            assert_waits(ptx, capability)
