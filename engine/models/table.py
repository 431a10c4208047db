"""The table of models in docs/models.md, made from the code.

python -m dayshift.engine.models.table docs/models.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from gguf import GGML_QUANT_SIZES

from dayshift.engine.models.gguf_config import MODEL_TYPES
from dayshift.engine.models.hugging_face_config import SUPPORTED
from dayshift.engine.quant.dequantize import BLOCK_TYPES, OFFSETS
from dayshift.engine.quant.packed import FORMATS, packed_bytes

BEGIN, END = "<!-- tables: made by dayshift.engine.models.table -->", "<!-- end of tables -->"

# What has run on a GPU, by architecture; to be extended by whoever sees it.
SEEN_ON_GPU = {
    "llama": "H200, bfloat16 (shape of Llama-3.1-8B), Q4_K_M (of Llama-3.2-3B), random weights",
    "qwen3": "H200, bfloat16 (the default planner), Q4_K_M (shape of Qwen3-32B, random weights)",
    "qwen3_moe": "H200, bfloat16 and Q3_K_M (shape of Qwen3-30B-A3B, random weights)",
    "gpt_oss": "H200, MXFP4 (shape of gpt-oss-20b, random weights)",
}

_NAMES = {
    "llama": "Llama 3.x, SmolLM2",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "Gemma 3 (text)",
    "gemma3": "Gemma 3 with a vision tower (its text model)",
}
_DETAILS = {
    "llama": "rope scaling llama3, linear, YaRN",
    "qwen2": "biases of queries, keys and values",
    "qwen3": "norms of queries and keys",
    "qwen3_moe": "the same, experts",
    "gpt_oss": "sinks, every second layer sees 128 tokens, YaRN, MXFP4 experts",
    "gemma3_text": "five of six layers see a window, rope of their own, norms before and after",
    "gemma3": "pictures are not taken",
}


def tables() -> str:
    """Both tables as Markdown."""
    gguf_names = {model_type: name for name, model_type in MODEL_TYPES.items()}
    rows = [
        f"| {_NAMES[model_type]} | `{model_type}` | {gguf_names.get(model_type, 'no')} | "
        f"{_DETAILS[model_type]} | our decoder | {SEEN_ON_GPU.get(model_type, 'not yet')} |"
        for model_type in SUPPORTED
    ]
    lines = [
        "| architecture | `model_type` | GGUF | what it has | path | seen on a GPU |",
        "|---|---|---|---|---|---|",
        *rows,
        "| any other with a KV cache | | no | no sessions | `transformers` fallback | not yet |",
        "",
        "| GGUF type | bits a weight in the file | on a GPU | scales | offset |",
        "|---|---|---|---|---|",
    ]
    for quant_type in BLOCK_TYPES:
        block_size, block_bytes = GGML_QUANT_SIZES[quant_type]
        packed = packed_bytes(block_size, quant_type)
        lines.append(
            f"| {quant_type.name} | {8 * block_bytes / block_size:g} | {8 * packed / block_size:g} | "
            f"one for {FORMATS[quant_type].group} weights | {OFFSETS.get(quant_type, 0)} |"
        )
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """The page with its tables as the code has them."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_tables(path.read_text(encoding="utf-8")), encoding="utf-8")
