"""The decoder against transformers, on random small models of every family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import GenerateResult, Message, SamplingParams, SessionConfig, TurnState
from dayshift.engine.block_pool import BlockPool, Chunk, Context
from dayshift.engine.kernels import reference
from dayshift.engine.model_runner import ModelRunner
from dayshift.engine.models.decoder import AttentionBatch
from dayshift.engine.models.folder import resolve_model
from dayshift.engine.models.formats import load_model_config
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.models.rope import inverse_frequencies
from dayshift.types import DayshiftError
from tests.engine.driving import generate, take_turn, turn_request

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3-untied": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "llama": {"model_type": "llama", "head_dim": 32},
    "llama3-rope-scaling": {"model_type": "llama", "rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0},
    "qwen2": {"model_type": "qwen2"},
    "qwen3-moe": {"model_type": "qwen3_moe"},
    "qwen3-moe-untied": {"model_type": "qwen3_moe", "norm_topk_prob": False, "tie_word_embeddings": False},
    "qwen3-yarn": {"rope_scaling": YARN, "rope_theta": 1000.0},
    "gpt-oss": {"model_type": "gpt_oss"},
    "gemma3": {"model_type": "gemma3_text"},
}


def make_runner(
    folder: Path, dtype: torch.dtype = torch.float32, keep_quantized: bool | None = None
) -> ModelRunner:
    device = torch.device("cpu")
    model = load_decoder(
        folder,
        dtype=dtype,
        device=device,
        num_positions=512,
        load_format="auto",
        seed=0,
        keep_quantized=keep_quantized,
    )
    pool = BlockPool(model.config, num_blocks=64, block_size=16, dtype=dtype, device=device)
    return ModelRunner(model, pool, max_num_seqs=4, max_context=512)


def logits_of(runner: ModelRunner, token_ids: list[int], chunk_sizes: list[int]) -> torch.Tensor:
    """Logits after each chunk's last token, the prompt computed in these chunks."""
    context = Context(token_ids)
    runner.pool.reserve(context, len(token_ids))
    rows = [
        runner.run([Chunk(context=context, num_tokens=size, needs_sampling=True)]) for size in chunk_sizes
    ]
    runner.pool.release(context)
    return torch.cat(rows)


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, make_tiny_model: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(seed=3, **MODELS[name])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.randint(0, 512, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = theirs(token_ids).logits[0]

    got = logits_of(make_runner(folder), token_ids[0].tolist(), [1] * 40 + [64, 95, 1])

    ends = torch.tensor([*range(40), 103, 198, 199])
    assert (got - expected[ends]).abs().max() < 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_last_tokens_alone_have_the_hidden_states_of_all(
    name: str, make_tiny_model: Callable[..., Path]
) -> None:
    """Of a whole prompt, of chunks that go on and decodes, with a row that pads the batch; and the KV is that
    of all tokens."""
    folder = make_tiny_model(seed=5, **MODELS[name])
    runner = make_runner(folder)
    pool, blocks = runner.pool, torch.arange(64, dtype=torch.int32).view(4, 16)
    for steps in ([[40, 0]], [[70, 150, 9, 0], [50, 1, 8, 0], [1, 3, 1, 0]]):
        pool.kv.normal_(generator=torch.Generator().manual_seed(6))
        seq_lens = torch.zeros(len(steps[0]), dtype=torch.int32)
        for step in steps:
            counts = torch.tensor(step, dtype=torch.int32)
            starts, seq_lens = seq_lens, seq_lens + counts
            ends = counts.cumsum(0, dtype=torch.int32)
            spans = [torch.arange(a, b) for a, b in zip(starts.tolist(), seq_lens.tolist(), strict=True)]
            batch = AttentionBatch(
                positions=torch.cat(spans).int(),
                slot_mapping=torch.cat([row * 256 + span for row, span in enumerate(spans)]),
                block_tables=blocks[: len(step)],
                seq_lens=seq_lens,
                query_start=torch.cat([torch.zeros(1, dtype=torch.int32), ends]),
                prompt_lengths=tuple(step) if step is steps[0] and len(steps) == 1 else None,
            )
            token_ids = torch.randint(0, 512, (sum(step),), generator=torch.Generator().manual_seed(7))
            before = pool.kv.clone()
            expected, stored = runner.model(token_ids, batch, pool.kv), pool.kv.clone()
            pool.kv.copy_(before)
            got = runner.model(token_ids, batch, pool.kv, last_tokens=(ends - 1).long())
            torch.testing.assert_close(got[:-1], expected[ends[:-1] - 1], rtol=1e-4, atol=1e-5)
            assert got.isfinite().all()
            torch.testing.assert_close(pool.kv, stored)


def test_mxfp4_experts_of_a_folder(make_tiny_model: Callable[..., Path]) -> None:
    """gpt-oss as it is published: experts in blocks and scales, unpacked at load or kept packed."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = make_tiny_model(seed=4, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    path = folder / "model.safetensors"
    weights = load_file(path)
    unpacked = dict(weights)
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in weights if name.endswith((".gate_up_proj", ".down_proj"))]:
        num_experts, num_in, num_out = weights.pop(name).shape
        shape = (num_experts, num_out, num_in // 32)
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 124, shape, generator=generator, dtype=torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        unpacked[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    token_ids = list(range(50))
    got = [logits_of(make_runner(folder, keep_quantized=kept), token_ids, [50]) for kept in (False, True)]

    (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"quantization_config": None})
    )
    save_file(unpacked, path, metadata={"format": "pt"})
    expected = logits_of(make_runner(folder), token_ids, [50])
    assert torch.equal(got[0], expected)
    torch.testing.assert_close(got[1], expected, rtol=1e-4, atol=1e-4)


def test_rope_scaling_changes_only_long_wavelengths(make_tiny_model: Callable[..., Path]) -> None:
    plain = inverse_frequencies(load_model_config(make_tiny_model(model_type="llama", rope_theta=500.0)))
    scaled = inverse_frequencies(load_model_config(make_tiny_model(**MODELS["llama3-rope-scaling"])))
    ratio = plain / scaled
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"attention_bias": True}, "attention_bias is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported: silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, r"swiglu_limit 5\.0 is not supported; supported: 7"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supp"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "dense layers among expert layers"),
    ],
)
def test_unsupported_options_are_refused(
    fields: dict[str, Any], message: str, make_tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(DayshiftError, match=message):
        load_model_config(make_tiny_model(**fields))


def test_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(DayshiftError, match="model_type 'mamba' is not supported; supported are llama"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("name", ["llama3-rope-scaling", "qwen2", "qwen3-moe", "gpt-oss", "gemma3"])
def test_parked_session_goes_on_as_a_fresh_request(name: str, make_tiny_model: Callable[..., Path]) -> None:
    """Sessions park after every turn; each reply equals that of one request with the whole past."""
    config = EngineConfig(
        model=str(make_tiny_model(seed=3, **MODELS[name])),
        device="cpu",
        num_kv_blocks=64,
        window=512,
        max_num_batched_tokens=24,
        restore="read",
    )
    engine = Engine(config)
    session_id = engine.open_session(SessionConfig(system="You lead a robot.")).session_id
    tokenizer = engine.tokenizer
    past = tokenizer.encode(tokenizer.render_system("You lead a robot."))
    for index in range(3):
        text = f"Step {index}: put the bowl on the plate."
        reply = take_turn(engine, turn_request(session_id, text, at=float(index)))
        assert (reply.ledger.restored > 0) == (index > 0)
        past += tokenizer.encode(tokenizer.render_turn((Message("user", text),)))
        assert (
            generate(engine, past, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids == reply.token_ids
        )
        past += [*reply.token_ids, *tokenizer.reply_end_token_ids]
        engine.park_session(session_id)
    engine.close()


def test_dummy_weights_spread_tokens_over_the_experts(
    make_tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_tiny_model(model_type="qwen3_moe", num_experts=32, num_experts_per_tok=4, hidden_size=256)
    device = torch.device("cpu")
    model = load_decoder(
        folder, dtype=torch.float32, device=device, num_positions=512, load_format="dummy", seed=0
    )
    loads: list[torch.Tensor] = []

    pick = reference.route_top_k

    def route_top_k(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, expert_ids = pick(*args)
        loads.append(expert_ids.flatten().bincount(minlength=32))
        return weights, expert_ids

    monkeypatch.setattr(reference, "route_top_k", route_top_k)
    pool = BlockPool(model.config, num_blocks=32, block_size=16, dtype=torch.float32, device=device)
    prompt = torch.randint(0, 512, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    context = Context(prompt[:1])
    pool.reserve(context, len(prompt))
    # As drafts all tokens have logits, and pass the last layer.
    chunk = Chunk(context=context, num_tokens=1, needs_sampling=True, draft_ids=tuple(prompt[1:]))
    ModelRunner(model, pool, max_num_seqs=1, max_context=512).run([chunk])
    assert len(loads) == 4
    for load in loads:  # 50 tokens an expert on average
        assert load.min() > 10
        assert load.max() < 150


def test_missing_folder_is_one_line() -> None:
    with pytest.raises(DayshiftError, match=r"model folder ./no/such does not exist") as caught:
        resolve_model("./no/such")
    assert "\n" not in str(caught.value)


def test_damaged_weights_are_named(make_tiny_model: Callable[..., Path]) -> None:
    folder = make_tiny_model(seed=5)
    (folder / "model.safetensors").write_bytes(b"\x00" * 64)
    with pytest.raises(DayshiftError, match=r"model\.safetensors is not a readable safetensors file"):
        make_runner(folder)


def test_missing_weight_is_named(make_tiny_model: Callable[..., Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(seed=6)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(DayshiftError, match=r"lacks 1 weights, model\.layers\.2\.self_attn\.k_proj\.weight"):
        make_runner(folder)


@pytest.mark.parametrize("name", ["gpt-oss", "gemma3"])
def test_compaction_and_recall_with_sliding_windows(name: str, make_tiny_model: Callable[..., Path]) -> None:
    """Sessions longer than their window, which compact and recall: parked after every turn or never.

    Layers see 24 tokens, far less than the session's window; what they see is decided by the places of
    tokens in the context, so an archived turn needs nothing else than in a model without windows.
    """
    config = EngineConfig(
        model=str(make_tiny_model(seed=3, **MODELS[name])),
        device="cpu",
        num_kv_blocks=64,
        window=256,
        restore="read",
    )
    engine = Engine(config)
    parked, kept = (engine.open_session(SessionConfig(system="Lead.")).session_id for _ in range(2))
    archived: set[int] = set()
    replies: list[GenerateResult] = []
    for index in range(9):
        recall = (0.0, 2.0) if index == 8 else None
        replies = [
            take_turn(
                engine, turn_request(session_id, f"Step {index}: put it away.", float(index), recall=recall)
            )
            for session_id in (parked, kept)
        ]
        assert replies[0].token_ids == replies[1].token_ids
        archived |= {turn.index for turn in engine.session(kept).turns if turn.state is TurnState.ARCHIVED}
        engine.park_session(parked)
    assert archived >= {0, 1}
    assert replies[1].recalled_turns == (0, 1)
    assert replies[1].ledger.recalled > 24
    assert replies[1].ledger.recomputed == 0
    engine.close()
