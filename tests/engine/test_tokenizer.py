import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.engine.api import ContextLengthExceededError, InvalidRequestError, Message, ToolCall
from dayshift.engine.tokenizer import Tokenizer
from dayshift.types import DayshiftError

QWEN3 = """
{%- if messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|im_start|>system\n\nToday is "
    "{{ strftime_now('%d %b %Y') }}<|im_end|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n\n"
    "{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)

# Keeps only the last question's number: an earlier turn reads differently once another follows.
REWRITING = (
    "{% for m in messages %}{% if loop.last %}[now]{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer(tiny_model_dir)


@pytest.fixture
def with_template(tiny_model_dir: Path, tmp_path: Path):
    def load(source: str) -> Tokenizer:
        folder = tmp_path / "model"
        shutil.copytree(tiny_model_dir, folder)
        (folder / "chat_template.jinja").write_text(source)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))
        return Tokenizer(folder)

    return load


def test_encode_decode_round_trip_keeps_unicode(tokenizer: Tokenizer):
    text = "Greif zu: 把碗放在盘子上 🤖\n\tdone"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(
    text=st.text(max_size=200) | st.integers(0, 400).map(lambda n: " " * n + "ab" * n),
    num_tokens=st.integers(0, 100),
)
def test_what_fits_is_encoded_whole_and_only_what_cannot_fit_is_refused(
    tokenizer: Tokenizer, text: str, num_tokens: int
):
    token_ids = tokenizer.encode(text)
    try:
        assert tokenizer.encode_at_most(text, num_tokens, refusal="too long") == token_ids
    except ContextLengthExceededError:
        assert len(token_ids) > num_tokens


def test_other_threads_go_on_while_a_long_text_is_encoded(tokenizer: Tokenizer):
    began, num_turns = threading.Event(), 0

    def encode() -> int:
        began.set()
        return len(tokenizer.encode("turn on the stove " * 50_000))

    with ThreadPoolExecutor(1) as executor:
        encoding = executor.submit(encode)
        began.wait()
        while not encoding.done():
            num_turns += 1
            time.sleep(0.001)
    assert encoding.result() > 50_000
    assert num_turns > 10


def test_eos_ids_come_from_every_config_file(tokenizer: Tokenizer):
    assert tokenizer.eos_token_ids == {0, 2}


def test_special_tokens_are_read_in_text_and_left_out_of_decoded_text(tokenizer: Tokenizer):
    ids = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "user\nhi"
    assert tokenizer.token_text(2) == "<|im_end|>"


MESSAGES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40)


@given(st.lists(st.tuples(MESSAGES, MESSAGES), min_size=1, max_size=4), st.none() | MESSAGES)
@settings(max_examples=60, deadline=None)
def test_a_session_put_together_from_turns_is_the_whole_chat(tokenizer: Tokenizer, turns, system):
    messages = [] if system is None else [Message("system", system)]
    parts = [tokenizer.render_system(system)]
    for user, reply in turns:
        parts += [tokenizer.render_turn([Message("user", user)]), reply, tokenizer.reply_end]
        messages += [Message("user", user), Message("assistant", reply)]
    assert "".join(parts) == tokenizer.render_chat(messages, add_generation_prompt=False)


@pytest.mark.parametrize("source", [QWEN3, LLAMA3], ids=["qwen3", "llama3"])
def test_templates_of_the_field_work_in_sessions(with_template, source: str):
    tokenizer = with_template(source)
    assert tokenizer.session_refusal is None
    first, second = [Message("user", "one")], [Message("user", "two")]
    session = (
        tokenizer.render_system("be brief")
        + tokenizer.render_turn(first)
        + "yes"
        + tokenizer.reply_end
        + tokenizer.render_turn(second)
    )
    whole = [Message("system", "be brief"), *first, Message("assistant", "yes"), *second]
    assert session == tokenizer.render_chat(whole)
    past = tokenizer.render_past_turn([*first, Message("assistant", "yes")])
    assert past == tokenizer.render_turn(first) + "yes" + tokenizer.reply_end


def test_the_templates_own_system_prompt_is_kept_when_none_is_given(with_template):
    prefix = with_template(LLAMA3).render_system(None)
    assert prefix.startswith("<|endoftext|><|im_start|>system\n\nToday is ")


def test_a_template_that_rewrites_earlier_turns_is_refused_for_sessions_only(with_template):
    tokenizer = with_template(REWRITING)
    assert "chat template" in tokenizer.session_refusal
    assert tokenizer.render_chat([Message("user", "hi")]).startswith("[now]")


def test_a_template_whose_replies_do_not_end_in_eos_is_refused_for_sessions(with_template):
    tokenizer = with_template(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    assert tokenizer.session_refusal.endswith("does not end a reply with an eos token")


# As Qwen3: tools in the system prompt, what they return as a message of the user.
QWEN3_TOOLS = """
{%- if tools %}{{- '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}
{{- messages[0].content + '\n\n' }}{% endif %}{{- '# Tools\n' }}
{%- for tool in tools %}{{- tool | tojson + '\n' }}{% endfor %}{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
{%- elif m.role != 'system' %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# As Llama 3's own: tools stand in the first message of the user.
IN_USER = (
    "{% set told = namespace(tools=tools) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'user' and told.tools %}{{ told.tools | tojson }}{% set told.tools = none %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Says of a result how many calls stand before it.
OF_CALL = QWEN3_TOOLS.replace(
    "'\n<tool_response>\n'", "(messages[loop.index0 - 1].tool_calls or []) | length | string"
)

TOOL = {"type": "function", "function": {"name": "move", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("system", ["be brief", None])
def test_a_session_with_tools_is_the_whole_chat_with_them(with_template, system: str | None):
    tokenizer = with_template(QWEN3_TOOLS)
    assert tokenizer.session_tools_refusal is None
    call = ToolCall("c", "move", '{"to": "shelf"}')
    question, results = (
        [Message("user", "go")],
        [Message("tool", r, tool_call_id="c") for r in ("one", "two")],
    )
    called = '\n<tool_call>\n{"name": "move", "arguments": {"to": "shelf"}}\n</tool_call>'
    session = (
        tokenizer.render_system(system, [TOOL])
        + tokenizer.render_turn(question)
        + called
        + tokenizer.reply_end
        + tokenizer.render_turn(results)
    )
    first = [] if system is None else [Message("system", system)]
    whole = [*first, *question, Message("assistant", "", (call,)), *results]
    assert session == tokenizer.render_chat(whole, tools=[TOOL])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (QWEN3, "has no tools"),
        (IN_USER, "changes the first turn with what stands before it"),
        (OF_CALL, "changes what a tool returned with what stands before it"),
    ],
    ids=["none", "in the user's message", "a result of its call"],
)
def test_tools_that_cannot_stand_in_a_session_are_refused_with_the_reason(with_template, source, reason):
    tokenizer = with_template(source)
    assert tokenizer.session_refusal is None
    assert reason in tokenizer.session_tools_refusal
    with pytest.raises(InvalidRequestError, match=r"^tools: .*chat template"):
        tokenizer.render_system("be brief", [TOOL])
    assert tokenizer.render_system("be brief") != ""


def test_what_a_template_refuses_is_the_requests_fault(with_template):
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        tokenizer.render_chat([Message("user", "hi")])


def test_a_template_cannot_leave_the_sandbox(with_template):
    tokenizer = with_template("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        tokenizer.render_chat([Message("user", "hi")])


def test_a_broken_template_or_folder_is_one_line(with_template, tmp_path: Path):
    with pytest.raises(DayshiftError, match=r"chat_template\.jinja: chat template, line 1"):
        with_template("{% for %}")
    with pytest.raises(DayshiftError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DayshiftError, match="not a tokenizer"):
        Tokenizer(tmp_path)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_whole_text(tokenizer: Tokenizer, data: st.DataObject):
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30)
    real_text = st.text(max_size=12).map(tokenizer.encode)
    token_ids = [i for part in data.draw(st.lists(any_ids | real_text, max_size=4)) for i in part]
    decoder = tokenizer.stream_decoder()
    pieces = []
    while token_ids[len(pieces) :]:
        pieces.append(decoder.push([token_ids[len(pieces)]]))
    assert "".join(pieces) + decoder.finish() == tokenizer.decode(token_ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=30))
@settings(max_examples=200, deadline=None)
def test_no_streamed_piece_ends_inside_a_character(tokenizer: Tokenizer, text: str):
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.push([token_id]) for token_id in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Decodes as Llama 2 does: spaces are part of words, the first one is dropped, bytes stand apart."""
    words = ["▁put", "▁the", "bowl", "▁", "s", *(f"<0x{byte:02X}>" for byte in "把🤖".encode())]
    vocab = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="s"))
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(st.lists(st.sampled_from(["▁put", "▁the", "bowl", "▁", "s", "把", "🤖"]), max_size=12))
@settings(max_examples=200, deadline=None)
def test_spaces_that_belong_to_words_survive_streaming(sentencepiece: Tokenizer, units: list[str]):
    vocab = json.loads(sentencepiece.json_text)["model"]["vocab"]
    names = [
        name
        for unit in units
        for name in ([unit] if unit in vocab else [f"<0x{byte:02X}>" for byte in unit.encode()])
    ]
    token_ids = [vocab[name] for name in names]
    decoder = sentencepiece.stream_decoder()
    pieces = [decoder.push([token_id]) for token_id in token_ids]
    assert "".join(pieces) + decoder.finish() == sentencepiece.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)
