"""Masked attention of many heads to few: the Triton kernel against torch, torch against repeated keys."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dayshift.policy.smolvla.attention import attend_torch, attend_triton, fill_mask, mask_buffer
from dayshift.policy.smolvla.config import LayerShape

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def attend(request: pytest.FixtureRequest) -> Attend:
    """`attend_triton` on CPU tensors."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda *args: executor.submit(attend_triton, *args).result(timeout=300)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend_triton(q.cuda(), k.cuda(), v.cuda(), mask.cuda()).cpu()

    return on_gpu


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(
    batch: int, heads: tuple[int, int], queries: int, keys: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values, mask, and what is allowed; keys and values lie in a longer cache."""
    num_heads, num_kv_heads = heads
    shape = LayerShape(
        hidden_size=num_heads * head_dim,
        intermediate_size=1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        attention_bias=False,
        mlp_bias=False,
    )
    q = randn(batch, num_heads, queries, head_dim, seed=3).to(dtype)
    cache = randn(2, batch, num_kv_heads, keys + 5, head_dim, seed=4).to(dtype)
    k, v = cache[:, :, :, :keys]
    allowed = randn(batch, queries, keys, seed=6) > 0
    mask = mask_buffer(batch, shape, queries, keys, q)
    fill_mask(mask, allowed)
    return q, k, v, mask, allowed


@pytest.mark.parametrize(("batch", "heads", "queries", "keys", "head_dim", "dtype"), [
    (2, (6, 2), 5, 11, 8, torch.float32),
    (1, (15, 5), 50, 130, 64, torch.float32),
    (1, (3, 1), 7, 64, 20, torch.float32),
    (3, (4, 4), 70, 65, 16, torch.float16),
    (1, (3, 1), 30, 150, 64, torch.float32),  # tiles of middle size
    (1, (1, 1), 20, 300, 16, torch.float32),  # small ones
])  # fmt: skip
def test_the_kernel_attends_as_torch_does(
    attend: Attend,
    batch: int,
    heads: tuple[int, int],
    queries: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype,
):
    q, k, v, mask, _ = case(batch, heads, queries, keys, head_dim, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    actual, wanted = attend(q, k, v, mask), attend_torch(q, k, v, mask)
    assert actual.shape == (batch, queries, heads[0] * head_dim)
    torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 32])  # small tiles of queries, middle-sized, and large ones
def test_bfloat16_on_a_gpu(batch: int):
    """By itself: Triton's interpreter multiplies bfloat16 wrongly."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q, k, v, mask, _ = (x.cuda() for x in case(batch, (15, 5), 50, 277, 64, torch.bfloat16))
    torch.testing.assert_close(
        attend_triton(q, k, v, mask), attend_torch(q, k, v, mask), atol=2e-2, rtol=2e-2
    )


def test_a_query_that_may_attend_to_nothing_has_numbers(attend: Attend):
    """The mean of all values, as in torch; the rows beside it are what they would be."""
    q, k, v, mask, allowed = case(2, (4, 2), 3, 70, 16, torch.float32)
    allowed[1, 2] = False
    fill_mask(mask, allowed)
    actual = attend(q, k, v, mask)
    torch.testing.assert_close(actual, attend_torch(q, k, v, mask), atol=1e-5, rtol=1e-5)
    means = v[1].mean(dim=1).repeat_interleave(2, 0).flatten()
    torch.testing.assert_close(actual[1, 2], means, atol=1e-5, rtol=1e-5)


def test_masked_keys_and_what_lies_behind_them_change_nothing(attend: Attend):
    """Not even when they are huge: a cache holds what was there before."""
    q, k, v, mask, allowed = case(1, (6, 2), 5, 40, 16, torch.float32)
    allowed[..., 30:] = False
    fill_mask(mask, allowed)
    before = attend(q, k, v, mask)
    k[:, :, 30:], v[:, :, 30:] = 1e4, 1e4
    torch.testing.assert_close(attend(q, k, v, mask), before, atol=1e-5, rtol=1e-5)


def test_grouped_queries_attend_as_with_repeated_keys():
    q, k, v, mask, allowed = case(2, (6, 2), 5, 11, 8, torch.float32)
    assert mask.stride(2) % 8 == 0
    wanted = F.scaled_dot_product_attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=allowed[:, None]
    )
    actual = attend_torch(q, k, v, mask)
    torch.testing.assert_close(actual, wanted.transpose(1, 2).flatten(2), atol=1e-6, rtol=1e-5)
