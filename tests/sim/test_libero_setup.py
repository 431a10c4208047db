from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

from dayshift.sim import libero_setup


def test_libero_is_importable_with_standard_input_closed_and_an_empty_cache(tmp_path) -> None:
    code = (
        "import os, sys; os.close(0)\n"
        "from dayshift.sim.tasks import find_task\n"
        "print(find_task('turn on the stove').index, 'mujoco' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin", "XDG_CACHE_HOME": str(tmp_path)},
        check=True,
    )
    assert done.stdout.split() == ["7", "False"]
    assert len(list(tmp_path.rglob("config.yaml"))) == 1


def test_a_mujoco_that_settles_differently_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.4.0")
    with pytest.raises(libero_setup.SimulatorSetupError, match=r"mujoco 3\.4\.0 .*3\.3"):
        libero_setup.prepare_libero.__wrapped__()
