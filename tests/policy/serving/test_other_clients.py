"""openpi's and vla-eval's own clients, unmodified, drive our server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from dayshift.engine.config import EngineConfig
from dayshift.engine.server.run import ServerOptions, running_server
from tests.policy.serving.conftest import MakeVenv

_HERE = Path(__file__).parent
API_KEY = "a secret"
OPENPI = ("openpi-client==0.1.2", "typing-extensions")  # which it imports and does not ask for


def drive(python: Path, script: str, *arguments: str) -> dict[str, Any]:
    command = [str(python), str(_HERE / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(600)
def test_openpi_client(make_venv: MakeVenv, server_url: str) -> None:
    python = make_venv(*OPENPI)
    address = urlsplit(server_url)
    by_port = drive(python, "drive_openpi.py", "127.0.0.1", str(address.port), "")
    by_path = drive(python, "drive_openpi.py", f"ws://{address.netloc}/v1/policies/arm/openpi", "", "")
    for report in (by_port, by_path):
        assert report["numpy"].startswith("1.")
        assert report["metadata"]["name"] == "arm"
        assert report["metadata"]["chunk_size"] == 10
        assert report["shape"] == report["shape_again"] == [10, 7]
        assert report["dtype"] == "float32"
        assert report["is_finite"]
        assert report["timing"] == ["infer_ms", "queued_ms", "total_ms"]
        assert "wanted are 8 finite numbers" in report["error"]
        assert "Traceback" not in report["error"]


@pytest.mark.timeout(600)
def test_openpi_client_with_an_api_key(make_venv: MakeVenv, engine_config: EngineConfig) -> None:
    python = make_venv(*OPENPI)
    options = ServerOptions(port=0, in_process=True, api_key=API_KEY)
    with running_server(engine_config, options) as url:
        port = str(urlsplit(url).port)
        assert drive(python, "drive_openpi.py", "127.0.0.1", port, API_KEY)["shape"] == [10, 7]
        with pytest.raises(AssertionError, match="HTTP 403"):
            drive(python, "drive_openpi.py", "127.0.0.1", port, "another")


@pytest.mark.timeout(600)
def test_vla_eval_connection(make_venv: MakeVenv, server_url: str) -> None:
    python = make_venv("vla-eval==0.8.0")
    url = f"ws://{urlsplit(server_url).netloc}/v1/policies/arm/vla-eval"
    every_step = drive(python, "drive_vla_eval.py", url)
    chunks = drive(python, "drive_vla_eval.py", f"{url}?n_action_steps=10")
    for report in (every_step, chunks):
        assert report["observation_params"] == {"send_wrist_image": True, "send_state": True}
        assert report["mismatches"] == []
        assert report["shapes"] == [[7]] * 4
        assert "wanted are 8 finite numbers" in report["error"]
        assert report["num_different"] == 3
