"""Kernels in CUDA C++: compiled without a GPU, kept on disk, launched as Triton's are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dayshift.engine.kernels import cuda_source
from dayshift.engine.kernels.ahead import compile_ahead
from dayshift.engine.kernels.cuda_source import CudaKernel, cubin_of, cuda_kernel
from tests.engine.cuda_kernels import resources_of

ARCHITECTURES = ["sm_90a", "sm_100a"]
SCALE = """
#include <cuda_bf16.h>
extern "C" __global__ void scale(const __nv_bfloat16* x, __nv_bfloat16* y, int size, float factor) {
    extern __shared__ float held[];
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    held[threadIdx.x] = __bfloat162float(x[i]) * factor + OFFSET;
    y[i] = __float2bfloat16_rn(held[threadIdx.x]);
}
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
        yield tmp_path / "cache"


@pytest.fixture
def scale(tmp_path: Path) -> CudaKernel:
    source = tmp_path / "scale.cu"
    source.write_text(SCALE)
    return cuda_kernel(str(source), "scale", OFFSET=3)


def launch(kernel: CudaKernel, x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
    y = torch.empty_like(x)
    num_threads = 64
    num_programs = -(-len(x) // num_threads)
    kernel.launch(num_programs, num_threads, x, y, len(x), factor, shared_bytes=100 * 1024)
    return y


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_without_a_gpu(scale: CudaKernel, architecture: str):
    resources = resources_of(scale, architecture)
    assert 0 < resources.registers <= 32
    assert resources.stack_bytes == 0


def test_is_compiled_once_for_all_processes(scale: CudaKernel, cache: Path):
    first = cubin_of(scale, "sm_90a")
    (kept,) = cache.rglob("*.cubin")
    kept.write_bytes(b"as another process left it")
    cubin_of.cache_clear()
    assert cubin_of(scale, "sm_90a") == b"as another process left it"
    other = cuda_kernel(scale.source, "scale", OFFSET=4)
    assert cubin_of(other, "sm_90a") != first
    Path(scale.source).write_text(SCALE + "\n")  # another version of the program
    cubin_of.cache_clear()
    assert cubin_of(scale, "sm_90a").startswith(b"\x7fELF")


def test_a_source_that_does_not_compile_says_where(tmp_path: Path):
    source = tmp_path / "wrong.cu"
    source.write_text("\nint wrong = nothing;\n")
    with pytest.raises(RuntimeError, match=r'wrong\.cu\(2\): error: identifier "nothing" is undefined'):
        cubin_of(cuda_kernel(str(source), "wrong"), "sm_90a")


def test_a_pass_that_compiles_launches_nothing(
    scale: CudaKernel, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cuda_source, "architecture_of", lambda device: "sm_90a")
    outs: list[torch.Tensor] = []

    def layers() -> None:
        outs.extend(launch(scale, torch.ones(100, dtype=torch.bfloat16)) for _ in range(2))

    assert (compile_ahead(layers), compile_ahead(layers)) == (1, 0)
    assert not torch.cat(outs).any()
    assert len(list(cache.rglob("*.cubin"))) == 1


def test_a_pass_that_compiles_says_what_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cuda_source, "architecture_of", lambda device: "sm_90a")
    source = tmp_path / "wrong.cu"
    source.write_text("int wrong = nothing;")
    with pytest.raises(RuntimeError, match="nothing"):
        compile_ahead(lambda: launch(cuda_kernel(str(source), "wrong"), torch.ones(1)))


@pytest.mark.gpu
def test_launches_alone_and_in_a_graph(scale: CudaKernel):
    x = torch.arange(100, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(launch(scale, x), x * 2 + 3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = launch(scale, launch(scale, x), 0.5)
    x.fill_(7)
    graph.replay()
    assert y.tolist() == [11.5] * 100
