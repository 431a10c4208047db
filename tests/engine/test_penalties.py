"""Penalties against a plain reading of their definition, and together in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine import Engine
from dayshift.engine.api import InvalidRequestError, SamplingParams
from dayshift.engine.config import EngineConfig
from dayshift.engine.sampler import RequestSampler, check_params, sample
from tests.engine.driving import generate

VOCAB_SIZE = 11

token_ids = st.integers(0, VOCAB_SIZE - 1)
penalised = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.lists(st.tuples(token_ids, st.sampled_from([-100.0, -1.0, 0.5, 100.0])), max_size=4).map(
        tuple
    ),
)


def expected_choice(
    logits: list[float], request: SamplingParams, prompt: list[int], output: list[int]
) -> list[float]:
    """The definition in `SamplingParams`, token by token."""
    result = []
    for token_id, logit in enumerate(logits):
        if token_id in prompt or token_id in output:
            factor = request.repetition_penalty
            logit = logit / factor if logit > 0 else logit * factor
        if token_id in output:
            logit -= request.presence_penalty
        logit -= request.frequency_penalty * output.count(token_id)
        logit += sum(bias for biased, bias in request.logit_bias if biased == token_id)
        result.append(logit)
    return result


@given(
    requests=st.lists(st.tuples(penalised, st.lists(token_ids, max_size=4)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_penalties_are_what_their_definition_says(
    requests: list[tuple[SamplingParams, list[int]]], seed: int
):
    generator = torch.Generator().manual_seed(seed)
    rows = [RequestSampler(request) for request, _ in requests]
    outputs: list[list[int]] = [[] for _ in requests]
    for row, (_, prompt) in zip(rows, requests, strict=True):
        row.see_prompt(prompt)
    for _ in range(6):
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=generator)
        original = logits.clone()
        sampled = sample(logits, rows).read().token_ids
        assert torch.equal(logits, original)
        for i, (request, prompt) in enumerate(requests):
            wanted = expected_choice(logits[i].double().tolist(), request, prompt, outputs[i])
            assert wanted[sampled[i]] == pytest.approx(max(wanted), abs=1e-4)
            outputs[i].append(sampled[i])


def test_logprobs_stay_the_models_own():
    logits = torch.zeros(1, VOCAB_SIZE)
    row = RequestSampler(SamplingParams(logit_bias=((4, 100.0),), logprobs=0))
    sampled = sample(logits, [row]).read()
    assert sampled.token_ids == [4]
    logprob = sampled.logprobs[0]
    assert logprob is not None
    assert logprob.logprob == pytest.approx(-torch.tensor(float(VOCAB_SIZE)).log().item())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("logit_bias", ((1, 101.0),)),
    ],
)
def test_penalties_out_of_range_are_refused_by_name(field: str, value: object):
    with pytest.raises(InvalidRequestError, match=rf"{field}: .* must be"):
        check_params(replace(SamplingParams(), **{field: value}))


@pytest.fixture(scope="module")
def engine(tiny_model_dir) -> Engine:
    return Engine(EngineConfig(model=str(tiny_model_dir), kv_cache_bytes=16 << 20))


def test_a_token_of_the_output_comes_once_where_it_is_penalised_enough(engine: Engine):
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1e6)
    reply = generate(engine, [5, 6, 7], sampling)
    assert len(set(reply.token_ids)) == 40
    assert not {5, 6, 7} & set(reply.token_ids)


def test_a_biased_token_is_chosen_or_shunned(engine: Engine):
    free = generate(engine, [5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    shunned = tuple((token_id, -100.0) for token_id in set(free.token_ids))
    other = generate(engine, [5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True, logit_bias=shunned))
    assert not set(free.token_ids) & set(other.token_ids)
    always = SamplingParams(max_tokens=8, logit_bias=((9, 100.0),))
    assert set(generate(engine, [5, 6, 7], always).token_ids) == {9}


def test_a_biased_token_outside_the_vocabulary_is_refused(engine: Engine):
    with pytest.raises(InvalidRequestError, match="token id 512 is outside the vocabulary"):
        generate(engine, [5], SamplingParams(logit_bias=((512, 1.0),)))
