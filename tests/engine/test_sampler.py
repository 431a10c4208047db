from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.api import InvalidRequestError, SamplingParams
from dayshift.engine.grammar import GrammarCompiler
from dayshift.engine.sampler import (
    RequestSampler,
    check_params,
    sample,
    sample_in_every_way,
    unpack_bitmask,
)
from dayshift.engine.tokenizer import Tokenizer

VOCAB_SIZE = 37

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 0.7, 1.0, 5.0, 1e300]),
    top_p=st.sampled_from([1e-9, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 5, VOCAB_SIZE, 1000]),
    seed=st.integers(0, 2**63),
)


def random_logits(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=generator)


def support(logits: torch.Tensor, request: SamplingParams) -> set[int]:
    """Tokens that may be drawn, by the definition of temperature, top-k and top-p."""
    if request.temperature == 0:
        return {int(logits.argmax())}
    ranked = sorted(range(len(logits)), key=lambda i: -float(logits[i]))
    ranked = ranked[: request.top_k or len(ranked)]
    wide = logits.double()
    weights = ((wide[ranked] - wide.max()) / request.temperature).exp()
    probabilities = (weights / weights.sum()).tolist()
    kept, mass = set(), 0.0
    for token_id, probability in zip(ranked, probabilities, strict=True):
        kept.add(token_id)
        mass += probability
        if mass >= request.top_p - 1e-12:
            break
    return kept


@given(requests=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_draws_stay_in_the_support_and_do_not_depend_on_neighbours(requests: list[SamplingParams], seed: int):
    num_tokens = 5
    together = [RequestSampler(request) for request in requests]
    alone = [RequestSampler(request) for request in requests]
    for position in range(num_tokens):
        logits = random_logits(len(requests), seed + position)
        batch = sample(logits, together).read().token_ids
        for row, request in enumerate(requests):
            assert batch[row] in support(logits[row], request)
            assert sample(logits[row : row + 1], [alone[row]]).read().token_ids == [batch[row]]


def test_draws_follow_the_filtered_distribution():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    request = RequestSampler(SamplingParams(temperature=1.0, top_p=0.9, seed=7))
    num_draws = 4000
    counts = np.bincount(
        [sample(logits, [request]).read().token_ids[0] for _ in range(num_draws)], minlength=4
    )
    expected = np.array([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert np.abs(counts / num_draws - expected).max() < 0.03
    assert counts[3] == 0


def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p():
    request = RequestSampler(SamplingParams(temperature=1.0, top_p=0.5, seed=0))
    assert {sample(torch.zeros(1, 2), [request]).read().token_ids[0] for _ in range(50)} == {0}


def test_temperature_sharpens_and_flattens():
    logits = torch.tensor([[1.0, 0.0]])
    shares = []
    for temperature in (0.25, 1.0, 4.0):
        request = RequestSampler(SamplingParams(temperature=temperature, seed=1))
        draws = [sample(logits, [request]).read().token_ids[0] for _ in range(2000)]
        shares.append(1 - sum(draws) / len(draws))
    expected = [1 / (1 + np.exp(-1 / temperature)) for temperature in (0.25, 1.0, 4.0)]
    assert np.abs(np.array(shares) - expected).max() < 0.03


def test_seeds_repeat_and_differ():
    logits = torch.zeros(1, VOCAB_SIZE)

    def draws(seed: int | None) -> list[int]:
        request = RequestSampler(SamplingParams(temperature=1.0, seed=seed))
        return [sample(logits, [request]).read().token_ids[0] for _ in range(20)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert draws(None) != draws(None)


def test_logprobs_are_the_models_own():
    logits = random_logits(3, seed=0)
    rows = [
        RequestSampler(SamplingParams(temperature=9.0, top_k=3, seed=1, logprobs=4)),
        RequestSampler(SamplingParams()),
        RequestSampler(SamplingParams(logprobs=0)),
    ]
    sampled = sample(logits, rows).read()
    expected = logits.log_softmax(-1)
    first, none, last = sampled.logprobs
    assert none is None
    assert first is not None
    assert last is not None
    assert first.token_id == sampled.token_ids[0]
    assert first.logprob == pytest.approx(float(expected[0, first.token_id]))
    best = expected[0].argsort(descending=True)[:4].tolist()
    assert [token_id for token_id, _ in first.top] == best
    assert [value for _, value in first.top] == pytest.approx(expected[0, best].tolist())
    assert last.top == ()
    assert last.logprob == pytest.approx(float(expected[2].max()))


@given(data=st.data(), vocab_size=st.integers(1, 100))
def test_bitmask_unpacks_lowest_bit_first(data: st.DataObject, vocab_size: int):
    bits = data.draw(st.lists(st.booleans(), min_size=vocab_size, max_size=vocab_size))
    padded = np.array(bits + [True] * (-vocab_size % 32))
    words = np.packbits(padded, bitorder="little").view(np.int32)
    unpacked = unpack_bitmask(torch.from_numpy(words).unsqueeze(0), vocab_size)
    assert unpacked.tolist() == [bits]


def test_grammar_rules_a_row_and_leaves_the_others(tiny_model_dir: Path):
    tokenizer = Tokenizer(tiny_model_dir)
    compiler = GrammarCompiler(tokenizer.json_text, tokenizer.vocab_size, tokenizer.eos_token_ids)
    schema = {"enum": ["yes", "no"]}
    generator = torch.Generator().manual_seed(0)
    grammar = compiler.compile(schema)
    rows = [
        RequestSampler(SamplingParams(logprobs=0)),
        RequestSampler(SamplingParams(temperature=2.0, seed=5, logprobs=0), grammar),
    ]
    constrained: list[int] = []
    while not grammar.is_complete:
        logits = torch.randn(2, tokenizer.vocab_size, generator=generator)
        original = logits.clone()
        sampled = sample(logits, rows).read()
        constrained.append(sampled.token_ids[1])
        grammar.accept(constrained[-1])
        assert torch.equal(logits, original)
        assert sampled.token_ids[0] == int(logits[0].argmax())
        logprob = sampled.logprobs[1]
        assert logprob is not None
        assert logprob.logprob == pytest.approx(float(logits[1].log_softmax(-1)[constrained[-1]]))
    assert tokenizer.decode(constrained) in ('"yes"', '"no"')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("logprobs", 21),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: float):
    with pytest.raises(InvalidRequestError, match=rf"{field}: .* must be"):
        check_params(replace(SamplingParams(), **{field: value}))


@given(requests=st.lists(params, min_size=1, max_size=4), seed=st.integers(0, 1000), penalty=st.booleans())
def test_logits_of_the_model_s_dtype_are_sampled_as_in_float32(
    requests: list[SamplingParams], seed: int, penalty: bool
):
    """Also beside a row that is computed in float32."""
    requests = [replace(request, logprobs=2, seed=7) for request in requests]
    if penalty:
        requests.append(SamplingParams(presence_penalty=0.3, logprobs=0, seed=7))
    narrow = random_logits(len(requests), seed).bfloat16()
    drawn = []
    for logits in (narrow, narrow.float()):
        rows = [RequestSampler(request) for request in requests]
        for row in rows:
            row.see_prompt((1, 2))
        drawn.append(sample(logits, rows).read())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_way_of_sampling_is_tried(device: str, monkeypatch: pytest.MonkeyPatch):
    from dayshift.engine import sampler

    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    tried: set[tuple[str, torch.dtype]] = set()

    def watch(module: object, name: str) -> None:
        whole = getattr(module, name)

        def watched(logits: torch.Tensor, *args: object) -> object:
            tried.add((name, logits.dtype))
            return whole(logits, *args)

        monkeypatch.setattr(module, name, watched)

    for name in ("draw_filtered", "penalise", "_logprobs"):
        watch(sampler, name)
    for name in ("largest", "draw_by_race"):
        watch(sampler.kernels, name)
    sample_in_every_way(500, torch.float16, torch.device(device))
    # Beside a row with a penalty all are float32; log probabilities are those of before.
    names = ("largest", "draw_by_race", "draw_filtered")
    both = {(name, dtype) for name in names for dtype in (torch.float16, torch.float32)}
    assert tried == both | {("penalise", torch.float32), ("_logprobs", torch.float16)}
