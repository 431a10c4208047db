"""`pull_model` from a hub of our own: an HTTP server on this machine that speaks the hub's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "c" * 40
_PROGRAM = """
import sys
from dayshift.engine.models.folder import pull_model
from dayshift.types import DayshiftError
for repo_id, file in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        print(pull_model(repo_id, file=file or None))
    except DayshiftError as error:
        print(error)
"""


class Hub(BaseHTTPRequestHandler):
    """Serves `root/<organisation>/<name>/...` as repositories with one commit."""

    def __init__(self, root: Path, *args: object) -> None:
        self.root = root
        super().__init__(*args)  # pyright: ignore[reportArgumentType]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            folder = self.root / parts[2] / parts[3]
            names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
            info = {"id": "/".join(parts[2:4]), "sha": COMMIT}
            if names is None:
                self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            elif "tree" in parts:
                files = [
                    {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": name}
                    for name in names
                ]
                self.answer(200, json.dumps(files).encode())
            else:
                info |= {"siblings": [{"rfilename": name} for name in names]}
                self.answer(200, json.dumps(info).encode())
            return
        path = self.root / parts[0] / parts[1] / parts[4]  # organisation, name, "resolve", revision, file
        if path.is_file():
            self.answer(200, path.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{path.name}"'})
        else:
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    root = tmp_path / "hub"
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, root))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield root, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_models_are_fetched(
    hub: tuple[Path, str], tmp_path: Path, make_tiny_model: Callable[..., Path]
) -> None:
    root, url = hub
    (root / "org").mkdir(parents=True)
    make_tiny_model().rename(root / "org" / "folder")
    (root / "org" / "folder" / "pytorch_model.bin").write_bytes(b"not wanted")
    gguf = root / "org" / "gguf"
    gguf.mkdir()
    for name in ("m-Q4_0.gguf", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "README.md"):
        (gguf / name).write_bytes(name.encode())
    (root / "org" / "empty").mkdir()

    asked = {
        "org/folder": "",
        "org/gguf": "m-Q8_0-00002-of-00002.gguf",
        "org/empty": "",
        "org/none": "",
    }
    arguments = [
        argument for pair in (*asked.items(), ("org/gguf", ""), ("org/gguf", "x.gguf")) for argument in pair
    ]
    # The library reads the endpoint when it is imported.
    environment = os.environ | {
        "HF_ENDPOINT": url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
    }
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *arguments],
        env=environment | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    folder, split, empty, none, several, missing = ended.stdout.splitlines()
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert Path(split).read_bytes() == b"m-Q8_0-00001-of-00002.gguf"
    assert {path.name for path in Path(split).parent.iterdir()} == {
        "m-Q8_0-00001-of-00002.gguf",
        "m-Q8_0-00002-of-00002.gguf",
    }
    assert empty == "org/empty holds no model"
    assert none.startswith("model org/none is no folder here and could not be fetched from the hub (Repo")
    assert several == (
        "org/gguf holds several GGUF files; name one of them: m-Q4_0.gguf, m-Q8_0-00001-of-00002.gguf"
    )
    assert missing.startswith("org/gguf has no file x.gguf; GGUF files: m-Q4_0.gguf, m-Q8_0")
