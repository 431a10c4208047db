"""How long a start took, and with what, as clients and `/metrics` are told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dayshift.engine.async_engine import AsyncEngine
from dayshift.engine.config import EngineConfig
from dayshift.engine.models.formats import load_model_config
from dayshift.engine.models.loader import load_decoder
from dayshift.engine.startup import StartupClock, phase


def test_phases_count_for_the_start_that_is_under_way() -> None:
    clock = StartupClock(time.monotonic() - 5.0)
    clock.imported()
    with clock.running():
        for _ in range(2):
            with phase("weights"):
                time.sleep(0.01)
    with phase("weights"):  # of no start
        time.sleep(0.01)
    times = clock.times()
    assert times.import_s >= 5.0
    assert 0.02 <= times.weights_s < times.total_s - 5.0
    assert times.graphs_s == 0.0


def test_a_start_in_one_line() -> None:
    clock = StartupClock(time.monotonic())
    clock.add("import", 4.0)
    clock.num_compiled = 12
    line = str(clock.times())
    assert (
        "import 4.0, weights 0.0, compile 0.0 (12 kernels), graphs 0.0 (0), host KV 0.0, measuring 0.0, other"
        in line
    )
    assert "\n" not in line


@pytest.mark.parametrize("in_process", [False, True])
def test_a_core_tells_how_it_started(tiny_model_dir: Path, in_process: bool) -> None:
    async def start() -> None:
        config = EngineConfig(model=str(tiny_model_dir), device="cpu", num_kv_blocks=64)
        began_at = time.monotonic()
        engine = await AsyncEngine.start(config, in_process=in_process)
        waited_s = time.monotonic() - began_at
        times, stats = engine.info.startup, await engine.stats()
        await engine.close()
        assert 0.0 < times.weights_s < times.total_s <= waited_s
        assert in_process or times.import_s > 0.0
        assert times.num_graphs == 0  # no GPU
        assert stats["startup_s"] == times.total_s
        assert stats["startup_weights_s"] == times.weights_s

    asyncio.run(start())


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [("qwen3", [0, -1]), ("qwen3_moe", [0, -1]), ("gpt_oss", [0, 1, -1]), ("gemma3_text", [0, 2, -1])],
)
def test_one_layer_of_each_kind(
    make_tiny_model: Callable[..., Path], model_type: str, kinds: list[int]
) -> None:
    """The first layer of each kind, and the last. The model stays whole, and the part has its weights."""
    folder = make_tiny_model(model_type=model_type)
    model = load_decoder(
        folder,
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_positions=64,
        load_format="auto",
        seed=0,
    )
    part = model.one_layer_of_each_kind()
    num_layers = load_model_config(folder).num_layers
    assert list(part.layer_ids) == [index % num_layers for index in kinds]
    assert [*part.layers] == [model.layers[index] for index in kinds]
    assert len(model.layers) == num_layers
    assert part.embed is model.embed


def test_a_start_does_not_wait_for_libraries_that_it_does_not_use(tiny_model_dir: Path) -> None:
    """Models are built without torch's compiler, and served without the simulator's libraries."""
    program = (
        "import sys\n"
        "import dayshift.experiments.commands.serve\n"
        "from dayshift.engine import Engine, EngineConfig\n"
        f"Engine(EngineConfig(model={str(tiny_model_dir)!r}, device='cpu', num_kv_blocks=64)).close()\n"
        "unused = ('torch._dynamo', 'sympy', 'transformers', 'mujoco', 'scipy.spatial')\n"
        "print([name for name in unused if name in sys.modules])\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "[]", ended.stderr


@pytest.mark.parametrize(
    "module", ["engine.server.run", "engine.router.replicas", "engine.client", "engine.bench.targets"]
)
def test_what_stands_in_front_of_the_core_does_not_load_torch(module: str) -> None:
    """It takes seconds, which a server's core would start later by."""
    program = f"import sys\nimport dayshift.{module}\nprint('torch' in sys.modules)\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == "False", ended.stderr
