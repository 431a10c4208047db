"""GPU series: the real NVML binding where there is no GPU, and a stand-in for its library that has two."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pynvml
import pytest

from dayshift.webui.monitor import MachineGauges
from dayshift.webui.series import SeriesReader, SeriesWriter

GPU_SERIES = {"gpu_percent", "gpu_memory_gib", "gpu_power_w"}


def has_gpu() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


@pytest.mark.skipif(has_gpu(), reason="this machine has a GPU")
def test_without_a_gpu_nvml_says_so_and_cpu_and_memory_are_sampled() -> None:
    with pytest.raises(pynvml.NVMLError):  # no driver, or no device
        pynvml.nvmlInit()
    gauges = MachineGauges()
    sample = gauges.sample()
    gauges.close()
    assert set(sample) == {"cpu_percent", "memory_gib"}


@pytest.mark.gpu
def test_a_gpu_tells_its_load_memory_and_power() -> None:
    gauges = MachineGauges()
    sample = gauges.sample()
    gauges.close()
    assert set(sample) >= GPU_SERIES
    assert 0 <= sample["gpu_percent"] <= 100
    assert sample["gpu_memory_gib"] > 0
    assert sample["gpu_power_w"] > 0


# Values as libnvidia-ml gives them: utilisation (GPU, memory) in %, memory (total, free, used) in bytes,
# power in mW.
TWO_GPUS = (
    {"utilization": (98, 41), "memory": (150754820096, 19042205696, 131712614400), "power": 611482},
    {"utilization": (0, 0), "memory": (150754820096, 150146908160, 607911936), "power": 77310},
)


class TwoGpuLibrary:
    """Stands where libnvidia-ml.so is: pynvml's own calls, structures and checks run against it."""

    def __getattr__(self, name: str) -> object:
        raise AttributeError(name)  # a function that this version of the library does not have

    def nvmlInitWithFlags(self, _flags: int) -> int:
        return 0

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: ctypes._CArgObject) -> int:
        count._obj.value = len(TWO_GPUS)  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: ctypes._CArgObject) -> int:
        handle = ctypes.c_void_p(index.value + 1)  # opaque to callers, never null
        ctypes.memmove(device, ctypes.byref(handle), ctypes.sizeof(handle))
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: object, rates: ctypes._CArgObject) -> int:
        rates._obj.gpu, rates._obj.memory = _of(device)["utilization"]  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: object, info: ctypes._CArgObject) -> int:
        info._obj.total, info._obj.free, info._obj.used = _of(device)["memory"]  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetPowerUsage(self, device: object, power: ctypes._CArgObject) -> int:
        power._obj.value = _of(device)["power"]  # type: ignore[attr-defined]
        return 0


def _of(device: object) -> dict:
    number = ctypes.cast(device, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert number is not None
    return TWO_GPUS[number - 1]


def test_two_gpus_become_three_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", TwoGpuLibrary())
    monkeypatch.setattr(pynvml, "_LoadNvmlLibrary", lambda: None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    gauges = MachineGauges()
    with SeriesWriter(tmp_path) as writer:
        for t in (0.5, 1.0):
            writer.append(t, gauges.sample())
    gauges.close()
    reader = SeriesReader(tmp_path)
    reader.refresh()
    assert set(reader.names) >= GPU_SERIES
    values = {name: reader.window(name, 0, 2, 100)[2].tolist() for name in GPU_SERIES}
    assert values["gpu_percent"] == [49.0, 49.0]  # the mean
    assert values["gpu_memory_gib"] == pytest.approx([(131712614400 + 607911936) / 2**30] * 2)
    assert values["gpu_power_w"] == pytest.approx([688.792] * 2)
