"""SentencePiece's tokenizers in GGUF files, against the library that trained them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from gguf import TokenType
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine import Engine, EngineConfig
from dayshift.engine.api import FinishReason, Message, SamplingParams, SessionConfig, TurnRequest
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError
from tests.engine.driving import joined, run

VOCAB_SIZE = 512
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
CORPUS = [
    "The robot put the bowl on the plate, and opened the middle drawer of the cabinet.",
    "Shift 12, job 3: turn on the stove; put the wine bottle on top of the rack!",
    "Übung macht den Meister: der Roboter schließt die Schublade.",
    '{"name": "move", "arguments": {"to": "shelf", "why": "it was  asked\\n"}}',
    "What was given up in shift 4? Nothing was given up; all 18 steps are done.",
] * 20


@pytest.fixture(scope="module", params=[True, False], ids=["with a space in front", "without"])
def trained(request: pytest.FixtureRequest) -> tuple[Any, bool]:
    """A small tokenizer as Llama 2's (a space before a text) or as Gemma's."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        user_defined_symbols=["\n\n", "<b>"],
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue()), request.param


def metadata_of(model: Any, has_space_in_front: bool) -> dict[str, Any]:
    """As llama.cpp's converter writes it."""

    def kind(token_id: int) -> TokenType:
        kinds = {
            TokenType.UNKNOWN: model.is_unknown,
            TokenType.CONTROL: model.is_control,
            TokenType.BYTE: model.is_byte,
            TokenType.UNUSED: model.is_unused,
        }
        found = [name for name, is_it in kinds.items() if is_it(token_id)]
        if model.id_to_piece(token_id) in ("\n\n", "<b>"):
            found = [TokenType.USER_DEFINED]
        return found[0] if found else TokenType.NORMAL

    ids = range(model.vocab_size())
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(token_id) for token_id in ids],
        "tokenizer.ggml.scores": [model.get_score(token_id) for token_id in ids],
        "tokenizer.ggml.token_type": [int(kind(token_id)) for token_id in ids],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": has_space_in_front,
        "tokenizer.chat_template": GEMMA_TEMPLATE,
    }


@pytest.fixture
def path(
    trained: tuple[Any, bool], make_tiny_model: Callable[..., Path], write_gguf: Callable[..., Path]
) -> Path:
    folder = make_tiny_model(
        model_type="gemma3_text",
        num_hidden_layers=7,
        layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
        rope_local_base_freq=10_000.0,
    )
    return write_gguf(folder, metadata=metadata_of(*trained))


def test_texts_are_cut_as_the_library_does(trained: tuple[Any, bool], path: Path) -> None:
    model, has_space_in_front = trained
    tokenizer = Tokenizer(path)
    text = st.text(st.sampled_from('the robot put  bowl,{}"1ü把🤖<opened▁')) | st.sampled_from(CORPUS)
    if not has_space_in_front:  # which llama.cpp, unlike the library, puts behind such tokens too
        text = st.lists(text | st.sampled_from(["\n", "\n\n", "<b>"])).map("".join)

    @given(text)
    @settings(max_examples=300, deadline=None)
    def check(text: str) -> None:
        token_ids = tokenizer.encode(text)
        assert token_ids == model.encode(text)
        assert tokenizer.decode(token_ids) == model.decode(token_ids)

    check()


def test_a_text_begins_with_bos_and_a_turn_ends_a_reply(trained: tuple[Any, bool], path: Path) -> None:
    model, _ = trained
    tokenizer = Tokenizer(path)
    plain = tokenizer.encode("put the bowl")
    assert tokenizer.encode("put the bowl", add_special_tokens=True) == [model.bos_id(), *plain]
    assert tokenizer.eos_token_ids == {model.eos_id(), model.piece_to_id("<end_of_turn>")}
    ids = tokenizer.encode("<start_of_turn>user\nhi<end_of_turn>")
    assert ids[0] == model.piece_to_id("<start_of_turn>")
    assert ids[-1] == model.piece_to_id("<end_of_turn>")


def test_sessions_and_grammars_work_with_it(path: Path) -> None:
    engine = Engine(EngineConfig(model=str(path), device="cpu", num_kv_blocks=64, window=512))
    session = engine.open_session(SessionConfig(system="be brief"))
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema |= {"additionalProperties": False}
    for number in range(2):
        request = TurnRequest(
            request_id=f"{number}",
            session_id=session.session_id,
            at=float(number),
            messages=(Message("user", "Is it done?"),),
            sampling=SamplingParams(max_tokens=40, temperature=1.0, seed=number, json_schema=schema),
        )
        engine.submit(request)
        result = joined(run(engine)[request.request_id])
        assert json.loads(result.text)["ok"] in (True, False)
        assert result.finish_reason is FinishReason.STOP
    engine.close()


def test_scores_that_are_not_those_of_the_tokens_are_one_line(
    make_tiny_model: Callable[..., Path], write_gguf: Callable[..., Path]
) -> None:
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, -1.0]}
    with pytest.raises(DayshiftError, match=r"512 tokens have 2 scores and 512 types"):
        Tokenizer(write_gguf(make_tiny_model(), metadata=metadata))
