"""Prompts that are to be captured attend in a thread that has planned them."""

import pytest
import torch

from dayshift.engine.kernels.prompt_attention import PromptPlanner, prompt_attention

pytestmark = pytest.mark.gpu
SCALE = 0.125


def prompt(num_tokens: int, num_kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values, cut out of one tensor as a model's are."""
    sizes = (4, num_kv_heads, num_kv_heads)
    heads = torch.randn(num_tokens, sum(sizes), 64, dtype=torch.bfloat16, device="cuda")
    q, k, v = heads.split(sizes, dim=1)
    return q, k, v


@torch.inference_mode()
def test_nothing_attends_while_it_is_planned_and_all_does_in_the_thread():
    parts = prompt(96)
    planner = PromptPlanner(parts[0].device)
    with planner.attends():
        assert not prompt_attention(*parts, (96,), SCALE).any()
        assert not prompt_attention(*parts, (32, 64), SCALE).any()
    expected = prompt_attention(*parts, (96,), SCALE)
    assert expected.any()
    assert torch.equal(planner.run(lambda: prompt_attention(*parts, (96,), SCALE)), expected)


def test_a_plan_that_fails_says_so():
    parts = prompt(96, num_kv_heads=3)  # which four heads cannot share
    planner = PromptPlanner(parts[0].device)
    with planner.attends():
        prompt_attention(*parts, (96,), SCALE)
    with pytest.raises(RuntimeError):
        planner.run(lambda: None)
