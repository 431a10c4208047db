"""The tables of docs/models.md, made from the code and from the record of what has run on a GPU.

python -m dayshift.engine.models.table docs/models.md benchmarks/seen_on_gpu.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gguf import GGML_QUANT_SIZES

from dayshift.engine.models.gguf_config import MODEL_TYPES
from dayshift.engine.models.hugging_face_config import SUPPORTED
from dayshift.engine.models.seen_on_gpu import FALLBACK, OUR_DECODER, SeenRun, read_runs, seen_models
from dayshift.engine.quant.dequantize import BLOCK_TYPES, OFFSETS
from dayshift.engine.quant.packed import FORMATS, packed_bytes

BEGIN, END = "<!-- tables: made by dayshift.engine.models.table -->", "<!-- end of tables -->"
BEGIN_STEPS, END_STEPS = "<!-- steps: made by dayshift.engine.models.table -->", "<!-- end of steps -->"

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


def tables(runs: Sequence[SeenRun]) -> str:
    """Architectures, where they were seen, and quantised types, as Markdown."""
    return "\n\n".join((_architectures(runs), _sightings(runs), _quant_types()))


def _architectures(runs: Sequence[SeenRun]) -> str:
    gguf_names = {model_type: name for name, model_type in MODEL_TYPES.items()}
    any_other = f"| any other with a KV cache | | no | no sessions | {FALLBACK} |"
    rows = [
        f"| {_NAMES[model_type]} | `{model_type}` | {gguf_names.get(model_type, 'no')} | "
        f"{_DETAILS[model_type]} | {OUR_DECODER} | {_seen(model_type, OUR_DECODER, runs)} |"
        for model_type in SUPPORTED
    ]
    return "\n".join(
        (
            "| architecture | `model_type` | GGUF | what it has | path | seen on a GPU |",
            "|---|---|---|---|---|---|",
            *rows,
            f"{any_other} {_seen(None, FALLBACK, runs)} |",
        )
    )


def _seen(model_type: str | None, path: str, runs: Sequence[SeenRun]) -> str:
    """On which machines with which weights; `model_type` None: any."""
    found = {
        (run.machine, model.weights): None
        for model, run in seen_models(runs)
        if model.path == path and model_type in (None, model.model_type)
    }
    by_machine: dict[str, list[str]] = {}
    for machine, weights in sorted(found):
        by_machine.setdefault(machine, []).append(weights.replace(", ", " + "))
    return "; ".join(f"{machine}: {', '.join(names)}" for machine, names in by_machine.items()) or "not yet"


def _sightings(runs: Sequence[SeenRun]) -> str:
    """A row for each model, which names the newest run that saw it by its number, and the runs."""
    found = sorted(seen_models(runs), key=lambda sighting: (sighting[0], sighting[1].machine))
    newest = [run for run in runs if any(run is seen_by for _, seen_by in found)]
    rows = [
        f"| `{model.model_type}` | {model.weights} | {model.path} | {run.machine} | "
        f"{_places(model.seen_in)} | {newest.index(run) + 1} |"
        for model, run in found
    ]
    head = "| `model_type` | weights | path | GPU | seen in | run, the newest |"
    notes = [
        f"{number}. `{run.command}`, {run.commit}, {run.date}{run.note and f' ({run.note})'}"
        for number, run in enumerate(newest, 1)
    ]
    return "\n".join((head, "|---|---|---|---|---|---|", *rows, "", *notes))


def _places(names: Sequence[str]) -> str:
    """Tests without their folders."""
    return ", ".join(name.rpartition("/")[2].replace(".py::", ": ") for name in names)


def _quant_types() -> str:
    lines = [
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


def steps(runs: Sequence[SeenRun]) -> str:
    """Whole steps of quantised models against their floor, as Markdown."""
    lines = [
        "| | GPU, commit | bytes of a token | floor | products | step of the engine |",
        "|---|---|---|---|---|---|",
    ]
    lines += (
        f"| {row.shape} @ {row.context} | {run.machine}, {run.commit} | {row.num_bytes / 1e9:.2f} GB | "
        f"{row.floor_ms:.3f} ms | {row.products_ms:.3f} ms, {row.floor_ms / row.products_ms:.0%} | "
        f"{row.step_ms:.3f} ms, {row.floor_ms / row.step_ms:.0%} |"
        for run in runs
        for row in sorted(run.quantized_steps, key=lambda row: row.num_bytes)
    )
    return "\n".join(lines)


def with_tables(page: str, runs: Sequence[SeenRun]) -> str:
    """The page with its tables as code and record have them."""
    page = _replaced(page, BEGIN, tables(runs), END)
    return _replaced(page, BEGIN_STEPS, steps(runs), END_STEPS)


def _replaced(page: str, begin: str, text: str, end: str) -> str:
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(
        with_tables(path.read_text(encoding="utf-8"), read_runs(Path(sys.argv[2]))), encoding="utf-8"
    )
