"""Linear layers of one token by bulk copies: on a GPU against their torch twins, and compiled without one."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.kernels import few_token_linear, one_token_bulk, reference
from dayshift.engine.kernels.one_token_bulk import ring_for
from dayshift.engine.models.config import Activation
from tests.engine.compiled_kernels import NUM_PROCESSORS, SHARED_MEMORY_BYTES, named_gpu
from tests.engine.cuda_kernels import CudaLaunch, cuda_launches, machine_code_of, resources_of
from tests.engine.test_kernels_triton import assert_close, randn

BF16, FP16 = torch.bfloat16, torch.float16
PROCESSOR_REGISTERS = 65_536
ATTENTION_BYTES, ATTENTION_REGISTERS = 17_408, 128 * 255  # of a program of `token_attention`
PRODUCTS: list[tuple[int, int, bool, Activation | None]] = [  # num_weight_rows, size, has_norm, kind
    (6144, 4096, True, None),
    (4096, 4096, False, None),
    (28672, 4096, True, "silu"),
    (4096, 14336, False, None),
    (128256, 4096, True, None),
    (5120, 2048, True, None),
    (151936, 2048, True, None),
    (20480, 2560, True, "gelu_tanh"),
    (24576, 5120, True, "clamped_swiglu"),
]


def operands(
    num_weight_rows: int, size: int, has_norm: bool, kind: Activation | None, dtype: torch.dtype
) -> dict[str, Any]:
    """All on the CPU, with a bias where there is no activation."""
    made: dict[str, Any] = {
        "x": randn(1, size, dtype=dtype),
        "weight": randn(num_weight_rows, size, dtype=dtype, seed=1) / size**0.5,
    }
    if kind is None:
        made["bias"] = randn(num_weight_rows, dtype=dtype, seed=2)
    if has_norm:
        made["residual"] = randn(1, size, dtype=dtype, seed=3)
        made["norm_weight"] = 1 + randn(size, dtype=torch.float32, seed=4) / 8
    return made


def specified(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    *,
    kind: Activation | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = x
    if residual is not None and norm_weight is not None:
        x, summed = reference.rms_norm(x, norm_weight, 1e-5, residual)
    y = reference.linear(x, weight, bias)
    return (y if kind is None else reference.gated_activation(y, kind)), summed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("num_weight_rows", "size", "has_norm", "kind"),
    [
        (6144, 4096, True, None),
        (4096, 14336, False, None),
        (2 * 5001, 2048, True, "silu"),  # an odd number of outputs for some programs
        (2 * 2047, 4096, True, "gelu_tanh"),
        (8194, 1280, False, "clamped_swiglu"),
        (40, 768, True, None),  # fewer rows than programs
        (1, 256, False, None),
        (333, 10240, True, None),  # five warps share a row
    ],
)
def test_multiplies(
    num_weight_rows: int, size: int, has_norm: bool, kind: Activation | None, dtype: torch.dtype
):
    made = operands(num_weight_rows, size, has_norm, kind, dtype)
    on_gpu = {name: tensor.cuda() for name, tensor in made.items()}
    expected = specified(**made, kind=kind)
    one_token_bulk.multiply(**on_gpu, eps=1e-5, kind=kind)
    actual = one_token_bulk.multiply(**on_gpu, eps=1e-5, kind=kind)  # begins while the first ends
    for one, other in zip(actual, expected, strict=True):
        assert_close(one.cpu(), other)


@pytest.mark.gpu
def test_products_in_a_row_wait_for_each_other():
    x = randn(1, 4096, dtype=BF16).cuda()
    weights = [(randn(4096, 4096, dtype=BF16, seed=i) / 64).cuda() for i in range(4)]
    expected = x
    for weight in weights:
        expected = expected @ weight.T

    def layers() -> torch.Tensor:
        out = x
        for weight in weights:
            out = one_token_bulk.multiply(out, weight)[0]
        return out

    assert_close(layers(), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layers()
    for _ in range(50):
        graph.replay()
    assert torch.equal(out, layers())


@pytest.mark.gpu
def test_is_chosen_for_large_weights():
    weight = torch.zeros(4096, 4096, dtype=BF16, device="cuda")
    x = torch.zeros(1, 4096, dtype=BF16, device="cuda")
    major, _ = torch.cuda.get_device_capability()
    assert one_token_bulk.can_multiply(x, weight) == (major >= 9)
    assert not one_token_bulk.can_multiply(x, weight[:64])
    unaligned = torch.zeros(4097, dtype=BF16, device="cuda")[1:].view(1, 4096)
    assert not one_token_bulk.can_multiply(unaligned, weight)
    assert not few_token_linear.linear(unaligned, weight).any()


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_compiles(product: tuple[int, int, bool, Activation | None], dtype: torch.dtype, capability: int):
    launch = launch_of(*product, dtype, capability)
    resources = resources_of(launch.kernel, f"sm_{capability}a")
    assert resources.stack_bytes == 0
    # One program on a processor, and one of attention beside it.
    assert launch.num_programs == NUM_PROCESSORS[capability]
    left = SHARED_MEMORY_BYTES[capability] + 1024 - launch.shared_bytes - resources.shared_bytes
    assert ATTENTION_BYTES <= left < launch.shared_bytes
    assert launch.num_threads * resources.registers <= PROCESSOR_REGISTERS - ATTENTION_REGISTERS


@pytest.mark.parametrize("capability", [90, 100])
def test_the_next_kernel_begins_after_this_one_has_waited(capability: int):
    """As attention needs it, which reads where tokens stand without a wait of its own."""
    for product in PRODUCTS[:2]:
        code = machine_code_of(launch_of(*product, BF16, capability).kernel, f"sm_{capability}a")
        # What `griddepcontrol` becomes: the wait, and the word to the next kernel.
        assert [name for name in code if name in ("ACQBULK", "PREEXIT")] == ["ACQBULK", "PREEXIT"]
        assert any(name.startswith("UBLKCP") for name in code)  # a bulk copy


def launch_of(
    num_weight_rows: int,
    size: int,
    has_norm: bool,
    kind: Activation | None,
    dtype: torch.dtype,
    capability: int,
) -> CudaLaunch:
    """What a product launches on such a GPU."""
    made: dict[str, Any] = {
        "x": torch.empty(1, size, dtype=dtype),
        "weight": torch.empty(num_weight_rows, size, dtype=dtype),
    }
    if has_norm:
        made |= {"residual": torch.empty(1, size, dtype=dtype), "norm_weight": torch.empty(size)}
    with named_gpu(capability), cuda_launches(capability) as launches:
        assert one_token_bulk.can_multiply(**made, kind=kind)
        one_token_bulk.multiply(**made, eps=1e-5, kind=kind)
    (launch,) = launches
    return launch


@pytest.mark.parametrize(
    ("change", "dtype"), [("norm_weight", BF16), ("bias", torch.float32), ("x", torch.float32)]
)
def test_other_dtypes_are_for_others(change: str, dtype: torch.dtype):
    made: dict[str, Any] = {
        "x": torch.empty(1, 4096, dtype=BF16),
        "weight": torch.empty(4096, 4096, dtype=BF16),
        "residual": torch.empty(1, 4096, dtype=BF16),
        "norm_weight": torch.empty(4096),
        "bias": torch.empty(4096, dtype=BF16),
    }
    with named_gpu(90):
        assert one_token_bulk.can_multiply(**made)
        assert not one_token_bulk.can_multiply(**{**made, change: made[change].to(dtype)})
    with named_gpu(89):
        assert not one_token_bulk.can_multiply(**made)


@given(
    num_outs=st.integers(1, 300_000),
    size=st.integers(1, 160).map(lambda chunks: chunks * 128),
    has_norm=st.booleans(),
    kind=st.sampled_from([None, "silu"]),
    processors=st.integers(1, 200),
    shared_bytes=st.integers(50_000, 232_448),
)
def test_rings_fit(
    num_outs: int, size: int, has_norm: bool, kind: Activation | None, processors: int, shared_bytes: int
):
    ring = ring_for(num_outs * (2 if kind else 1), size, has_norm, kind, processors, shared_bytes)
    if ring is None:
        return
    assert size % ring.parts == 0
    assert size // ring.parts % 256 == 0
    assert ring.pieces % ring.warps == ring.pieces % ring.stage == ring.warps % ring.parts == 0
    assert ring.stage % (ring.parts * (2 if kind else 1)) == 0
    assert 0 < ring.flight < ring.pieces // ring.stage
    assert ring.pieces * size // ring.parts * 2 < ring.shared_bytes <= shared_bytes
