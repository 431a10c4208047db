"""`dayshift doctor`: is everything here that a run needs?"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from dayshift.experiments.console import stdout_kept_for_json

_GIB = 2**30
_FREE_DISK_BYTES = 2 * _GIB
_FREE_MEMORY_BYTES = 4 * _GIB
_OPEN_FILES = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `is_ok` False means that a run would fail."""

    name: str
    is_ok: bool
    found: str


def doctor(
    runs_dir: Annotated[Path, typer.Option(help="Where runs would be recorded.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> int:
    """Look at Python, packages, rendering, GPU, memory and disk; exit code 1 when something is missing."""
    with stdout_kept_for_json() as print_json:
        findings = [
            _python(),
            _packages(),
            _rendering(),
            _gpu(),
            _memory(),
            _disk(runs_dir),
            _open_files(),
        ]
        is_ok = all(finding.is_ok for finding in findings)
        if as_json:
            print_json({"ok": is_ok, "findings": [asdict(finding) for finding in findings]})
    if not as_json:
        _print_table(findings)
    return 0 if is_ok else 1


def _print_table(findings: list[Finding]) -> None:
    table = Table("", "", "found", box=None)
    for finding in findings:
        mark = "[green]ok[/]" if finding.is_ok else "[red]missing[/]"
        table.add_row(mark, finding.name, finding.found)
    Console().print(table)


def _python() -> Finding:
    return Finding("python", sys.version_info[:2] == (3, 12), f"{platform.python_version()} (needs 3.12)")


def _packages() -> Finding:
    """Every dependency that the package declares, in a version that it allows."""
    wrong = []
    for text in metadata.requires("dayshift") or []:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
        else:
            if not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} (needs {requirement.specifier})")
    return Finding("packages", not wrong, "; ".join(wrong) or "all that pyproject.toml asks for")


def _rendering() -> Finding:
    """Opens a GL context in a process of its own: a broken driver may end the process."""
    probe = (
        "from dayshift.sim.libero_setup import prepare_libero, gl_backend, library_versions\n"
        "prepare_libero()\n"
        "import mujoco\n"
        "mujoco.GLContext(64, 64).make_current()\n"
        "print(f\"mujoco {library_versions()['mujoco']}, MUJOCO_GL={gl_backend()}\")\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return Finding("rendering", done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}")


def _gpu() -> Finding:
    """A GPU is welcome, not needed; one that is there and cannot be used is a mistake of the set-up."""
    import torch

    if not torch.cuda.is_available():
        if (driver := _nvidia_driver()) is not None:
            reason = f"torch {torch.__version__} cannot use this GPU: driver {driver} is too old for CUDA"
            return Finding("gpu", False, f"{reason} {torch.version.cuda}, or the device may not be opened")
        return Finding("gpu", True, f"none; torch {torch.__version__} computes on {os.cpu_count()} CPU cores")
    gpu = torch.cuda.get_device_properties(0)
    memory = f"{gpu.total_memory / _GIB:.0f} GiB"
    found = f"{gpu.name}, {memory}, compute capability {gpu.major}.{gpu.minor}"
    if (lacking := missing_to_launch_kernels()) is not None:
        return Finding("gpu", False, f"{found}; kernels cannot be launched without {lacking}")
    return Finding("gpu", True, found)


def missing_to_launch_kernels() -> str | None:
    """What Triton lacks to build the launchers of its kernels, which are C; None if nothing."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "a C compiler (gcc or clang on the PATH, or named by CC)"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    return None if header.is_file() else f"Python's headers ({header}, often in a package python3-dev)"


def _nvidia_driver() -> str | None:
    """Version of the NVIDIA driver; None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _open_files() -> Finding:
    """Each robot, session file and client takes some; the server raises its own limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_ok = hard == resource.RLIM_INFINITY or hard >= _OPEN_FILES
    found = "no limit" if hard == resource.RLIM_INFINITY else f"{hard} may be open at once"
    return Finding("open files", is_ok, f"{found} (needs {_OPEN_FILES}; ulimit -Hn)")


def _memory() -> Finding:
    num_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Finding("memory", num_bytes >= _FREE_MEMORY_BYTES, f"{num_bytes / _GIB:.1f} GiB free (needs 4)")


def _disk(runs_dir: Path) -> Finding:
    folder = runs_dir.absolute()
    while not folder.exists():
        folder = folder.parent
    num_bytes = shutil.disk_usage(folder).free
    is_ok = num_bytes >= _FREE_DISK_BYTES and os.access(folder, os.W_OK)
    writable = "" if os.access(folder, os.W_OK) else ", not writable"
    return Finding("disk", is_ok, f"{num_bytes / _GIB:.1f} GiB free at {folder}{writable} (needs 2)")
