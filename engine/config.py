"""The engine's one configuration object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dayshift.engine.servable import PolicySource

LoadFormat = Literal["auto", "dummy"]
Device = Literal["auto", "cpu", "cuda"]
Restore = Literal["cheapest", "read"]
DType = Literal["auto", "float32", "float16", "bfloat16"]
KVCacheDType = Literal["auto", "int8", "fp8"]
Speculation = Literal["history", "off"]
RecallGateAction = Literal["text", "refuse", "off"]
Arithmetic = Literal["own", "llama.cpp"]
KVAtRest = Literal["exact", "bf16", "int8", "fp8", "rot4", "residual"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an `Engine` is built from; everything has a default but the model.

    `model` is a folder or a hub id. `num_kv_blocks` None: as many as fit into `kv_cache_bytes`, or,
    if that is None too, into 85 % of the free GPU memory (1 GiB on a CPU).
    `num_threads` None: one for a model below 100 million parameters on a CPU, which is slower with
    more on shared cores; otherwise torch's own.
    `run_ahead`: launch a decode step before the last one's tokens are read; None: on CUDA.
    `speculation` "history": tokens are drafted from what the sequence or its session said before, and
    verified several in a step, where that was measured to pay; the output is the same as with "off", but
    for the rounding of steps of another size (none with `deterministic`).
    `draft_model`: a small model (folder, .gguf file or hub id) of the same vocabulary, which drafts where the
    history has nothing as good; `draft_kv_bytes` None: a tenth of the free GPU memory (256 MiB on a CPU).
    `deterministic`: what a request's tokens are, and every bit of their logits, does not depend on other
    requests, on how its prompt was cut into steps, or on its session's having been parked; slower.
    `arithmetic` "llama.cpp": the matrices of a GGUF file are multiplied with inputs rounded to 8 bits, and
    sums are made in llama.cpp's order, for the same text as llama.cpp's; on a CPU, see docs/models.md.
    `cuda_graphs` False: on CUDA, every kernel is launched by itself, as for a profile by kernel.
    `tensor_parallel`: heads, columns of MLPs and experts, and the vocabulary are split over the CUDA devices
    from `first_gpu` on, or over processes on a CPU.
    `policies` are served beside the model, in the same process, on `first_gpu`.
    `store_dir` None: sessions live in memory only, and are gone after a restart.
    `host_kv_bytes` None: 8 GiB (pinned) on CUDA, 256 MiB on a CPU; what exceeds it goes to the archive.
    `restore` "cheapest": rates are measured at the start, and a parked session is read back or computed
    again, whichever is faster; "read": what can be read is read, so that output does not depend on it.
    `recall_gate`: the first call that asks for turns as KV has the model measured, on a fixed conversation;
    where its predictions differ from those after recall as text by more than `recall_max_kl`, turns are
    recalled as "text", or such calls "refuse"d. "off": they are never measured.
    """

    model: str
    device: Device = "auto"
    first_gpu: int = 0  # index of the first CUDA device that is used
    tensor_parallel: int = 1  # devices (on a CPU: processes) that a model is spread over
    dtype: DType = "auto"  # float32 on a CPU, bfloat16 on CUDA
    load_format: LoadFormat = "auto"
    block_size: int = 16  # tokens in a KV block
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_dtype: KVCacheDType = "auto"  # of KV in use: the model's dtype, or a byte a value
    max_num_seqs: int = 128  # sequences running at once
    max_num_batched_tokens: int | None = None  # tokens computed in one step; None: 32,768 on CUDA, else 2,048
    max_num_tokens_beside_decodes: int = 512  # the same for a step with decodes in it
    max_waiting: int = 4096
    window: int = 8192  # of sessions that do not say; less where a context cannot be as long
    num_threads: int | None = None
    cuda_graphs: bool = True
    run_ahead: bool | None = None
    speculation: Speculation = "history"
    draft_model: str | None = None
    draft_kv_bytes: int | None = None  # keys and values of the draft model; contexts used longest ago go
    deterministic: bool = False
    arithmetic: Arithmetic = "own"
    policies: tuple[PolicySource, ...] = ()
    store_dir: Path | None = None
    store_quota_bytes: int | None = None  # of all session files; KV of closed sessions makes room for KV
    store_read_deadline_s: float = 30.0  # for one KV piece; then it is computed again
    kv_at_rest: KVAtRest = "exact"  # how KV is archived and parked; the others are smaller and lossy
    host_kv_bytes: int | None = None  # KV of parked sessions and archived turns in host memory
    restore: Restore = "cheapest"
    recall_gate: RecallGateAction = "text"
    recall_max_kl: float = 0.25  # nats for each token
    seed: int = 0
