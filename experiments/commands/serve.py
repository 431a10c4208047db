"""`dayshift serve`: the inference engine behind HTTP."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from dayshift.engine.config import (
    Arithmetic,
    Device,
    DType,
    EngineConfig,
    KVAtRest,
    KVCacheDType,
    LoadFormat,
    RecallGateAction,
    Speculation,
)
from dayshift.engine.servable import Sharing
from dayshift.engine.startup import StartupTimes
from dayshift.experiments.config import DEFAULT_MODEL
from dayshift.experiments.planners import model_source
from dayshift.experiments.policies import policy_sources
from dayshift.experiments.yaml_tree import ConfigError

_GIB = 2**30


def serve(
    model: Annotated[
        str,
        typer.Option(
            help="`default` (the small planner), a folder with a model, a .gguf file, or a hub's id."
        ),
    ] = DEFAULT_MODEL,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FOLDER", help="A SmolVLA checkpoint (or hub's id) to serve beside it."),
    ] = None,
    sharing: Annotated[
        Sharing,
        typer.Option(help="Policies on a GPU: slices between the LLM's steps, or streams beside them."),
    ] = "slices",
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than loopback need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    model_name: Annotated[
        str | None, typer.Option(help="Name that clients use; default: the folder's, or the id.")
    ] = None,
    api_key_env: Annotated[
        list[str] | None,
        typer.Option(help="Environment variable with a key that clients may send; repeat it for more keys."),
    ] = None,
    max_requests_per_key: Annotated[
        int | None, typer.Option(min=1, help="Calls under way at once with one key; default: no limit.")
    ] = None,
    max_request_tokens: Annotated[
        int | None, typer.Option(min=1, help="Prompt and longest replies of a request; default: no limit.")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds that a call may take; default: no limit.")
    ] = None,
    data_parallel: Annotated[
        int,
        typer.Option(min=1, help="Engines behind this address, on GPUs of their own; limits hold for each."),
    ] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs that the model is spread over; on a CPU: processes.")
    ] = 1,
    device: Annotated[Device, typer.Option(help="auto: CUDA where there is a GPU.")] = "auto",
    dtype: Annotated[DType, typer.Option(help="auto: bfloat16 on a GPU, float32 on a CPU.")] = "auto",
    load_format: Annotated[
        LoadFormat, typer.Option(help="dummy: random weights of the model's shape, for benchmarks.")
    ] = "auto",
    window: Annotated[int, typer.Option(min=128, help="Tokens that a session keeps unless it says.")] = 8192,
    kv_cache_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Memory for keys and values; default: most of the GPU, 1 on a CPU."),
    ] = None,
    host_kv_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Host memory for parked sessions; default: 8 with a GPU, 0.25 on a CPU."),
    ] = None,
    store_dir: Annotated[
        Path | None, typer.Option(help="Where sessions are kept; default: in memory only.")
    ] = None,
    store_quota_gib: Annotated[
        float | None, typer.Option(min=0, help="Largest size of all session files; text always stays.")
    ] = None,
    kv_cache_dtype: Annotated[
        KVCacheDType, typer.Option(help="KV in use; int8 and fp8 take half of bfloat16.")
    ] = "auto",
    kv_at_rest: Annotated[
        KVAtRest, typer.Option(help="How KV is archived and parked; all but exact are smaller and lossy.")
    ] = "exact",
    recall_gate: Annotated[
        RecallGateAction,
        typer.Option(help="If a model garbles recalled KV: recall text instead, or refuse; off: trust it."),
    ] = "text",
    speculation: Annotated[
        Speculation,
        typer.Option(help="history: several tokens a step where what was said before foretells them."),
    ] = "history",
    draft_model: Annotated[
        str | None,
        typer.Option(help="A small model of the same vocabulary, which drafts where history has no draft."),
    ] = None,
    deterministic: Annotated[
        bool, typer.Option(help="A reply does not depend on what else is computed, to the last bit; slower.")
    ] = False,
    arithmetic: Annotated[
        Arithmetic, typer.Option(help="llama.cpp: a GGUF file's text is llama.cpp's; slow, on a CPU.")
    ] = "own",
) -> None:
    """Serve a model: OpenAI's API, and sessions that remember."""
    from dayshift.engine.router.replicas import serve_replicas
    from dayshift.engine.server import Limits
    from dayshift.engine.server.run import ServerOptions, serve_until_signal

    keys = [key for variable in api_key_env or () if (key := api_key_from(variable)) is not None]
    config = EngineConfig(
        model=model_source(model),
        device=device,
        tensor_parallel=tensor_parallel,
        dtype=dtype,
        load_format=load_format,
        window=window,
        kv_cache_bytes=None if kv_cache_gib is None else int(kv_cache_gib * _GIB),
        host_kv_bytes=None if host_kv_gib is None else int(host_kv_gib * _GIB),
        policies=policy_sources(policy or (), device=device, sharing=sharing),
        store_dir=store_dir,
        kv_at_rest=kv_at_rest,
        recall_gate=recall_gate,
        speculation=speculation,
        draft_model=None if draft_model is None else model_source(draft_model),
        kv_cache_dtype=kv_cache_dtype,
        deterministic=deterministic,
        arithmetic=arithmetic,
        store_quota_bytes=None if store_quota_gib is None else int(store_quota_gib * _GIB),
    )
    options = ServerOptions(
        host=host,
        port=port,
        api_key=keys[0] if keys else None,
        more_api_keys=tuple(keys[1:]),
        limits=Limits(
            max_requests_per_key=max_requests_per_key,
            max_request_tokens=max_request_tokens,
            request_timeout_s=request_timeout,
        ),
        model_name=model_name or (DEFAULT_MODEL if model == DEFAULT_MODEL else None),
        on_started=_print_startup,
    )

    def on_ready(url: str) -> None:
        typer.echo(f"serving {model} on {url}", err=True)

    if data_parallel > 1:
        serve_replicas(config, options, data_parallel, on_ready)
    else:
        serve_until_signal(config, options, on_ready)


def _print_startup(times: StartupTimes) -> None:
    """A function of the module, because processes of replicas are given it."""
    typer.echo(f"started in {times}", err=True)


def api_key_from(variable: str | None) -> str | None:
    """The key in an environment variable. Raises ConfigError if there is none."""
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise ConfigError(f"--api-key-env: the environment has no {variable}")
    return key
