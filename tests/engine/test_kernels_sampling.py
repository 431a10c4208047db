"""The race between tokens: its generator, its distribution, and the kernel against the torch twin."""

import numpy as np
import pytest
import torch

from dayshift.engine.kernels import reference_sampling, sampling
from tests.engine.test_kernels_triton import Launch
from tests.engine.test_kernels_triton import interpreter as interpreter
from tests.engine.test_kernels_triton import launch as launch


def test_philox_gives_the_known_answers():
    """Counter and key 0 of Philox4x32-10 in Random123's file of known answers."""
    words = reference_sampling._philox(torch.tensor([0]), torch.tensor([0]))
    assert words.flatten().tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_shares_are_those_of_the_softmax(temperature: float):
    logits = torch.tensor([1.0, 0.4, -0.3, -1.6, -4.0, float("-inf")])
    num_draws = 200_000
    keys = torch.from_numpy(np.random.default_rng(5).integers(0, 2**53, num_draws))
    token_ids = reference_sampling.draw_by_race(
        logits.expand(num_draws, -1), torch.full((num_draws,), temperature), keys
    )
    shares = torch.bincount(token_ids, minlength=len(logits)) / num_draws
    expected = (logits.double() / temperature).softmax(-1)
    # Five standard deviations of a share of so many draws.
    assert bool(((shares - expected).abs() <= 5 * (expected * (1 - expected) / num_draws).sqrt()).all())


def test_rare_tokens_of_a_large_vocabulary_get_their_share():
    """10,000 tokens share a half: their noise is where the generator's steps are widest."""
    logits = torch.zeros(10_001)
    logits[0] = np.log(10_000)
    keys = torch.arange(100) * 7919 + 1
    token_ids = reference_sampling.draw_by_race(logits.expand(100, -1), torch.ones(100), keys)
    assert 25 <= int((token_ids == 0).sum()) <= 75


@pytest.mark.parametrize("vocab_size", [1, 37, 4096, 9001])
def test_draws_equal_the_twins(launch: Launch, vocab_size: int):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(6, vocab_size + 5, generator=generator)[:, :vocab_size]  # rows not adjacent
    logits[1] = float("-inf")
    temperatures = torch.tensor([0.0, 1.0, 0.3, 1e-30, 1e30, 1.0])
    keys = torch.tensor([0, 1, 2**52 + 5, 3, 4, 1])
    args = (logits, temperatures, keys)
    actual, expected = launch(sampling.draw_by_race, *args), reference_sampling.draw_by_race(*args)
    assert actual.tolist() == expected.tolist()
    assert actual[0] == logits[0].argmax()
    assert actual[3] == logits[3].argmax()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 37, 4096, 9001])
def test_the_largest_is_the_twins(launch: Launch, vocab_size: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size + 5, generator=generator).to(dtype)[:, :vocab_size]
    logits[1] = float("-inf")
    logits[2] = 0.0  # of equals the first
    logits[3, vocab_size // 2 :] = 7.0
    assert launch(sampling.largest, logits).tolist() == reference_sampling.largest(logits).tolist()


def test_no_rows(launch: Launch):
    empty = torch.empty(0)
    assert launch(sampling.largest, torch.empty(0, 9)).shape == (0,)
    assert launch(sampling.draw_by_race, torch.empty(0, 9), empty, empty.long()).shape == (0,)
