"""Verified drafts leave the sampled distribution as it is: exactly for each seed, and counted over many."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.api import GenerateRequest, SamplingParams
from dayshift.engine.block_pool import Context
from dayshift.engine.output import OutputText
from dayshift.engine.sampler import RequestSampler, sample
from dayshift.engine.scheduler import SequenceChunk
from dayshift.engine.sequence import Sequence as EngineSequence
from dayshift.engine.speculation.verify import kept_draws, rows_of
from dayshift.engine.tokenizer import Tokenizer

VOCAB_SIZE, LENGTH = 3, 3
Drafter = Callable[[list[int]], tuple[int, ...]]

LOGITS = torch.randn(VOCAB_SIZE + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(5))


def logits_after(token_ids: Sequence[int]) -> torch.Tensor:
    """A model whose next token depends on the last one."""
    return LOGITS[token_ids[-1] + 1 if token_ids else 0]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


def generate(
    tokenizer: Tokenizer, samplings: Sequence[SamplingParams], length: int, drafter: Drafter
) -> list[list[int]]:
    """The first tokens of an output for each sampling, with drafts verified wherever `drafter` makes some."""
    sequences: list[EngineSequence] = []
    for sampling in samplings:
        request = GenerateRequest(request_id="r", prompt_token_ids=(0,), sampling=sampling)
        output = OutputText(tokenizer, ())
        sequences.append(EngineSequence(request, Context(), [0], output, RequestSampler(sampling)))
    while running := [sequence for sequence in sequences if len(sequence.output_ids) < length]:
        # The first token comes with the prompt, without drafts.
        chunks = [
            SequenceChunk(
                context=sequence.context,
                num_tokens=1,
                needs_sampling=True,
                sequence=sequence,
                draft_ids=drafter(sequence.output_ids) if sequence.output_ids else (),
            )
            for sequence in running
        ]
        rows = [rows_of(chunk) for chunk in chunks]
        logits = [
            logits_after([*chunk.sequence.output_ids, *chunk.draft_ids[:i]])
            for chunk in chunks
            for i in range(1 + len(chunk.draft_ids))
        ]
        drawn = sample(torch.stack(logits), [*chain.from_iterable(rows)]).read()
        for sequence, kept in zip(running, kept_draws(chunks, rows, drawn), strict=True):
            sequence.output_ids += [token_id for token_id, _ in kept]
    return [sequence.output_ids[:length] for sequence in sequences]


samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    top_k=st.sampled_from([0, 0, 2]),
    seed=st.integers(0, 2**40),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
)


@given(
    sampling=samplings,
    drafts=st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4).map(tuple), min_size=1, max_size=6),
)
@settings(deadline=None)
def test_for_a_seed_any_drafts_give_the_same_output(
    tokenizer: Tokenizer, sampling: SamplingParams, drafts: list[tuple[int, ...]]
):
    turns = itertools.cycle(drafts)
    plain = generate(tokenizer, [sampling], 12, lambda _: ())
    assert generate(tokenizer, [sampling], 12, lambda _: next(turns)) == plain


@pytest.mark.parametrize("draft_ids", [(0, 0), (1, 2), (2, 1)])
def test_outputs_come_as_often_as_their_probability_says(tokenizer: Tokenizer, draft_ids: tuple[int, ...]):
    """All 27 outputs of three tokens, whose probabilities are known exactly, with a draft that is fixed and
    thus accepted with its own probability."""
    num_samples = 4000
    samplings = [SamplingParams(temperature=1.0, seed=seed) for seed in range(num_samples)]
    seen = Counter(tuple(output) for output in generate(tokenizer, samplings, LENGTH, lambda _: draft_ids))
    chi_square = 0.0
    for output in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        probability = 1.0
        for i, token_id in enumerate(output):
            probability *= logits_after(output[:i]).double().softmax(-1)[token_id].item()
        expected = num_samples * probability
        chi_square += (seen[output] - expected) ** 2 / expected
    assert chi_square < 54.05  # exceeded once in a thousand with 26 degrees of freedom; the seeds are fixed
