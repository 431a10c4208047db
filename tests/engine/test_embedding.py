"""The embedding's kernel against its twin."""

import pytest
import torch

from dayshift.engine.kernels import embedding, reference
from tests.engine.test_kernels_triton import Launch
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 64), (7, 2880), (130, 320), (0, 16)])
def test_the_kernel_embeds_as_the_twin(launch: Launch, num_tokens: int, size: int, dtype: torch.dtype):
    weight = torch.randn(50, size, dtype=dtype)
    token_ids = torch.arange(num_tokens) * 31 % 50
    for actual, expected in zip(
        launch(embedding.embed, weight, token_ids), reference.embed(weight, token_ids), strict=True
    ):
        assert torch.equal(actual, expected)
