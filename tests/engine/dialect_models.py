"""Tiny models with random weights that speak the dialects of Qwen3, Llama 3 and gpt-oss.

The chat templates are short ones of our own, in the format that the families use.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

QWEN = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% elif not (tools and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA = """\
{%- if tools %}<|im_start|>system
Answer with {"name": function name, "parameters": dictionary of arguments}.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}
{% if m.tool_calls %}{% set call = m.tool_calls[0].function -%}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HARMONY = """\
<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>
{%- if tools %}<|start|>developer<|message|># Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}{% set call = m.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# (template, tokens in the way of words, control tokens, tokens that end a reply)
_DIALECTS: dict[str, tuple[str, list[str], list[str], list[str]]] = {
    "qwen": (QWEN, ["<think>", "</think>", "<tool_call>", "</tool_call>"], [], ["<|im_end|>"]),
    "hermes_text": (QWEN.replace("enable_thinking", "unused"), [], [], ["<|im_end|>"]),
    "llama": (LLAMA, [], ["<|python_tag|>", "<|eom_id|>"], ["<|im_end|>", "<|eom_id|>"]),
    "harmony": (
        HARMONY,
        [],
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
        ["<|return|>", "<|call|>"],
    ),
}
DIALECTS = tuple(_DIALECTS)


def make_dialect_model(make_tiny_model: Callable[..., Path], dialect: str, **config: Any) -> Path:
    """A model folder as `make_tiny_model` writes it, with the dialect's tokens and template."""
    template, words, controls, ends = _DIALECTS[dialect]
    folder = make_tiny_model(vocab_size=520, **config)
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_tokens([tokenizers.AddedToken(word, normalized=False) for word in words])
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in controls])
    tokenizer.save(str(path))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "eos_token": ends[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    eos = [tokenizer.token_to_id(token) for token in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    model_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(model_config | {"eos_token_id": eos}))
    return folder
