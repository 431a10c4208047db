"""Samples engine and machine twice a second into a run's folder, in a thread of its own.

What the engine cannot tell at a moment (it is starting, or busy) leaves a gap; nothing here can stop
or slow a run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import httpx
import psutil
import pynvml
from prometheus_client.parser import text_string_to_metric_families

from dayshift.webui.engine_history import EngineHistory
from dayshift.webui.series import SeriesWriter

PERIOD_S = 0.5
_GIB = 2**30
logger = logging.getLogger(__name__)

# series name -> gauge of the engine
_GAUGES = {
    "batch_size": "dayshift_engine_num_running",
    "waiting": "dayshift_engine_num_waiting",
    "sessions": "dayshift_engine_num_sessions",
    "sessions_parked": "dayshift_engine_num_parked_sessions",
}
# series name -> counter of the engine, shown as its rate
_RATES = {
    "computed_tokens_per_s": "dayshift_engine_num_prompt_tokens_computed",
    "generated_tokens_per_s": "dayshift_engine_num_generated_tokens",
    "recalled_tokens_per_s": "dayshift_engine_num_recalled_tokens",
    "restored_tokens_per_s": "dayshift_engine_num_restored_tokens",
}


class Monitor:
    """Writes a run's series, requests and sessions while the context lasts.

    `now` gives seconds on the run clock.
    """

    def __init__(self, run_dir: Path, *, now: Callable[[], float], engine_url: str | None) -> None:
        self._run_dir = run_dir
        self._now = now
        self._engine_url = engine_url
        self._from_s = now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def _run(self) -> None:
        try:
            with ExitStack() as stack:
                writer = stack.enter_context(SeriesWriter(self._run_dir))
                machine = stack.enter_context(closing(MachineGauges()))
                engine = history = None
                if self._engine_url:
                    engine = stack.enter_context(closing(EngineGauges(self._engine_url)))
                    history = stack.enter_context(
                        EngineHistory(self._run_dir, self._engine_url, now=self._now, from_s=self._from_s)
                    )
                while not self._stop.wait(PERIOD_S):
                    if engine and history:
                        writer.append(self._now(), engine.sample(self._now()))
                        history.sample()
                    writer.append(self._now(), machine.sample())
        except OSError as error:
            logger.warning("monitor: %s; engine and machine are not recorded any more", error)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


class EngineGauges:
    """Reads an engine's `/metrics`."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=2.0, trust_env=False)
        self._last_t = 0.0
        self._last: dict[str, float] = {}

    def sample(self, t: float) -> dict[str, float]:
        """Values by series name; empty while the engine does not answer."""
        try:
            reply = self._http.get("/metrics").raise_for_status()
        except httpx.HTTPError:
            return {}
        found = {s.name: s.value for f in text_string_to_metric_families(reply.text) for s in f.samples}
        values = {name: found[gauge] for name, gauge in _GAUGES.items() if gauge in found}
        blocks = found.get("dayshift_engine_num_kv_blocks", 0.0)
        if blocks:
            values["kv_used_percent"] = 100 * (1 - found["dayshift_engine_num_free_kv_blocks"] / blocks)
        return values | self._rates(t, found)

    def _rates(self, t: float, found: Mapping[str, float]) -> dict[str, float]:
        counts = {name: found[counter] for name, counter in _RATES.items() if counter in found}
        seconds = t - self._last_t
        rates = {
            name: max(0.0, count - self._last[name]) / seconds
            for name, count in counts.items()
            if name in self._last and seconds > 0
        }
        self._last, self._last_t = counts, t
        return rates

    def close(self) -> None:
        self._http.close()


class MachineGauges:
    """GPU load, memory and power from NVML; CPU and memory always."""

    def __init__(self) -> None:
        psutil.cpu_percent()  # the first call only sets the starting point
        try:
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError:  # no driver: a machine without a GPU
            self._gpus = []

    def sample(self) -> dict[str, float]:
        """Values by series name; of several GPUs the mean load, and the sums of memory and power."""
        values = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_gib": psutil.virtual_memory().used / _GIB,
        }
        if self._gpus:
            loads = [int(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu) for gpu in self._gpus]
            memory = [int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) for gpu in self._gpus]
            power = [int(pynvml.nvmlDeviceGetPowerUsage(gpu)) for gpu in self._gpus]
            values["gpu_percent"] = sum(loads) / len(loads)
            values["gpu_memory_gib"] = sum(memory) / _GIB
            values["gpu_power_w"] = sum(power) / 1000
        return values

    def close(self) -> None:
        if self._gpus:
            pynvml.nvmlShutdown()
