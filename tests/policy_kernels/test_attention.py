"""Masked attention of many heads to few: the Triton kernel against torch, torch against repeated keys."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dayshift.policy.smolvla.attention import KeyMask, attend_torch, attend_triton
from dayshift.policy.smolvla.config import LayerShape

Attend = Callable[[Tensor, Tensor, Tensor, KeyMask], Tensor]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def attend(request: pytest.FixtureRequest) -> Attend:
    """`attend_triton` on CPU tensors."""
    if request.param == "interpreter":
        executor: ProcessPoolExecutor = request.getfixturevalue("interpreter")
        return lambda *args: executor.submit(attend_triton, *args).result(timeout=300)
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: KeyMask) -> Tensor:
        mask = KeyMask(scores=mask.scores.cuda(), num_open=mask.num_open, dense=None)
        return attend_triton(q.cuda(), k.cuda(), v.cuda(), mask).cpu()

    return on_gpu


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    """Queries; keys and values, which lie in a longer cache; and which keys are there and seen."""

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor
    num_open: int

    @property
    def mask(self) -> KeyMask:
        (batch, heads, queries, head_dim), num_kv_heads = self.q.shape, self.k.shape[1]
        shape = LayerShape(
            hidden_size=heads * head_dim,
            intermediate_size=1,
            num_heads=heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=1e-5,
            attention_bias=False,
            mlp_bias=False,
        )
        mask = KeyMask.allocate(batch, shape, queries, self.k.shape[2], self.num_open, self.q)
        mask.fill(self.valid, queries)
        return mask

    @property
    def allowed(self) -> Tensor:
        """Bool (batch, queries, keys): what the mask says, query by query."""
        num_queries, num_keys = self.q.shape[2], self.k.shape[2]
        allowed = torch.ones(len(self.q), num_queries, num_keys, dtype=torch.bool)
        for query in range(num_queries):
            for key in range(self.num_open, num_keys):
                allowed[:, query, key] = key - (num_keys - num_queries) <= query
        allowed[..., : self.valid.shape[1]] &= self.valid[:, None]
        return allowed


def case(
    batch: int,
    heads: tuple[int, int],
    queries: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    num_open: int | None = None,
) -> Case:
    num_heads, num_kv_heads = heads
    num_open = keys if num_open is None else num_open
    k, v = randn(2, batch, num_kv_heads, keys + 5, head_dim, seed=4).to(dtype)[:, :, :, :keys]
    return Case(
        q=randn(batch, num_heads, queries, head_dim, seed=3).to(dtype),
        k=k,
        v=v,
        valid=randn(batch, num_open, seed=6) > 0,
        num_open=num_open,
    )


@pytest.mark.parametrize(("batch", "heads", "queries", "keys", "head_dim", "dtype", "num_open"), [
    (2, (6, 2), 5, 11, 8, torch.float32, 11),
    (2, (6, 2), 5, 11, 8, torch.float32, 6),  # the queries' own tokens, causally
    (2, (6, 2), 70, 70, 8, torch.float32, 69),  # only the last token sees itself
    (1, (15, 5), 50, 130, 64, torch.float32, 80),
    (1, (3, 1), 7, 64, 20, torch.float32, 64),
    (3, (4, 4), 70, 165, 16, torch.float16, 95),
    (1, (3, 1), 30, 150, 64, torch.float32, 120),  # tiles of middle size
    (1, (1, 1), 20, 300, 16, torch.float32, 280),  # small ones
])  # fmt: skip
def test_the_kernel_attends_as_torch_does(
    attend: Attend,
    batch: int,
    heads: tuple[int, int],
    queries: int,
    keys: int,
    head_dim: int,
    dtype: torch.dtype,
    num_open: int,
):
    c = case(batch, heads, queries, keys, head_dim, dtype, num_open)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    actual, wanted = attend(c.q, c.k, c.v, c.mask), attend_torch(c.q, c.k, c.v, c.mask)
    assert actual.shape == (batch, queries, heads[0] * head_dim)
    torch.testing.assert_close(actual, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 8, 32])  # small tiles of queries, middle-sized, and large ones
@pytest.mark.parametrize("num_open", [277, 227])
def test_bfloat16_on_a_gpu(batch: int, num_open: int):
    """By itself: Triton's interpreter multiplies bfloat16 wrongly."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    c = case(batch, (15, 5), 50, 277, 64, torch.bfloat16, num_open)
    on_gpu = KeyMask(scores=c.mask.scores.cuda(), num_open=num_open, dense=None)
    actual = attend_triton(c.q.cuda(), c.k.cuda(), c.v.cuda(), on_gpu).cpu()
    torch.testing.assert_close(actual, attend_torch(c.q, c.k, c.v, c.mask), atol=2e-2, rtol=2e-2)


def test_a_query_that_may_attend_to_nothing_has_numbers(attend: Attend):
    """The mean of all values, as in torch; the robots beside it have what they would have."""
    c = case(2, (4, 2), 3, 70, 16)
    c.valid[1] = False
    actual = attend(c.q, c.k, c.v, c.mask)
    torch.testing.assert_close(actual, attend_torch(c.q, c.k, c.v, c.mask), atol=1e-5, rtol=1e-5)
    means = c.v[1].mean(dim=1).repeat_interleave(2, 0).flatten().expand(3, -1)
    torch.testing.assert_close(actual[1], means, atol=1e-5, rtol=1e-5)


def test_masked_keys_and_what_lies_behind_them_change_nothing(attend: Attend):
    """Not even when they are huge: a cache holds what was there before."""
    c = case(1, (6, 2), 5, 40, 16)
    c.valid[..., 30:] = False
    before = attend(c.q, c.k, c.v, c.mask)
    c.k[:, :, 30:], c.v[:, :, 30:] = 1e4, 1e4
    torch.testing.assert_close(attend(c.q, c.k, c.v, c.mask), before, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_open", [11, 6])
def test_grouped_queries_attend_as_with_repeated_keys(num_open: int):
    c = case(2, (6, 2), 5, 11, 8, num_open=num_open)
    wanted = F.scaled_dot_product_attention(
        c.q, c.k.repeat_interleave(3, 1), c.v.repeat_interleave(3, 1), attn_mask=c.allowed[:, None]
    )
    actual = attend_torch(c.q, c.k, c.v, c.mask)
    torch.testing.assert_close(actual, wanted.transpose(1, 2).flatten(2), atol=1e-6, rtol=1e-5)


def test_the_open_keys_alone_are_those_that_every_query_sees():
    c = case(2, (6, 2), 5, 11, 8, num_open=6)
    actual = attend_torch(c.q, c.k[:, :, :6], c.v[:, :, :6], c.mask.open_keys())
    cut = replace(c, k=c.k[:, :, :6], v=c.v[:, :, :6])
    torch.testing.assert_close(actual, attend_torch(c.q, cut.k, cut.v, cut.mask))
