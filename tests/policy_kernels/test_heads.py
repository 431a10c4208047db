"""Rows to heads: the Triton kernel against torch, in Triton's interpreter and on a GPU."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from dayshift.policy.smolvla.heads import KVSlots, Rotary, place_heads_torch, place_heads_triton
from dayshift.policy.smolvla.row_norm import RowNorm

Place = Callable[..., Any]


def _place_shared(
    rows: torch.Tensor, rotary: Rotary, num_heads: int, slots: KVSlots | None, norm: RowNorm | None
) -> torch.Tensor:
    return place_heads_triton(rows, rotary, num_heads, slots, norm)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Place:
    """`place_heads_triton` on CPU tensors; slots are written in place."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda *args: executor.submit(_place_shared, *args).result(timeout=120)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(
        rows: torch.Tensor, rotary: Rotary, num_heads: int, slots: KVSlots | None, norm: RowNorm | None
    ) -> torch.Tensor:
        on_device = None if slots is None else KVSlots(slots.keys.cuda(), slots.values.cuda())
        rotary = Rotary(rotary.cos.cuda(), rotary.sin.cuda())
        norm = None if norm is None else norm._replace(x=norm.x.cuda())
        q = place_heads_triton(rows.cuda(), rotary, num_heads, on_device, norm)
        if slots is not None and on_device is not None:
            slots.keys.copy_(on_device.keys)
            slots.values.copy_(on_device.values)
        return q.cpu()

    return on_gpu


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotary_of(batch: int, length: int, head_dim: int) -> Rotary:
    angles = randn(batch, 1, length, head_dim // 2, seed=9)
    return Rotary(angles.cos(), angles.sin())


def norm_of(batch: int, length: int, size: int) -> RowNorm:
    return RowNorm(3 * randn(batch, length, size, seed=5), 1e-5)


@pytest.mark.parametrize("norm_size", [None, 20])
@pytest.mark.parametrize("rotary_batch", ["each", "shared"])
@pytest.mark.parametrize(("batch", "length", "num_heads", "num_kv_heads", "head_dim"), [
    (1, 5, 15, 5, 64),
    (3, 4, 6, 2, 16),
    (2, 7, 3, 3, 10),
])  # fmt: skip
def test_kernel_and_torch_place_the_same(
    place: Place,
    batch: int,
    length: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_batch: str,
    norm_size: int | None,
):
    rows = randn(batch, length, (num_heads + 2 * num_kv_heads) * head_dim, seed=1)
    rotary = rotary_of(batch if rotary_batch == "each" else 1, length, head_dim)
    norm = None if norm_size is None else norm_of(batch, length, norm_size)
    caches = [torch.full((2, batch, num_kv_heads, length + 3, head_dim), -7.0) for _ in range(2)]
    queries = [
        run(rows, rotary, num_heads, KVSlots(cache[0, :, :, 3:], cache[1, :, :, 3:]), norm)
        for run, cache in zip((place, place_heads_torch), caches, strict=True)
    ]
    torch.testing.assert_close(*queries, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(*caches, atol=1e-6, rtol=1e-6)
    assert (caches[0][:, :, :, :3] == -7.0).all()  # in front of the slots nothing is written
    assert queries[0].is_contiguous()
    if norm is None:
        values = rows.unflatten(-1, (-1, head_dim))[:, :, num_heads + num_kv_heads :].transpose(1, 2)
        assert torch.equal(caches[0][1, :, :, 3:], values)


def test_queries_alone(place: Place):
    rows, rotary = randn(2, 5, 6 * 8, seed=2), rotary_of(2, 5, 8)
    torch.testing.assert_close(
        place(rows, rotary, 6, None, None),
        place_heads_torch(rows, rotary, 6, None, None),
        atol=1e-6,
        rtol=1e-6,
    )


def test_a_norm_that_is_due_is_the_one_before_the_projection():
    x, weight, rotary = randn(2, 5, 20, seed=7), randn(6 * 8, 20, seed=8), rotary_of(2, 5, 8)
    before = torch.nn.functional.rms_norm(x, (20,), eps=1e-5) @ weight.T
    wanted = place_heads_torch(before, rotary, 6, None, None)
    actual = place_heads_torch(x @ weight.T, rotary, 6, None, RowNorm(x, 1e-5))
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
