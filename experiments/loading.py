"""From a YAML file and `--set` to the runs that it stands for.

    file ← extends ← … ← --set        one tree (`yaml_tree.py`), later wins
    tree × matrix                     one tree per arm
    tree → Experiment                 checked by the models of `config.py`

`matrix:` maps dotted paths to lists of values; every combination is one arm, a run of its own.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dayshift.experiments.config import DEFAULT_MODEL, Experiment
from dayshift.experiments.mistakes import as_config_error, dotted, mistake, not_one_of
from dayshift.experiments.policies import policy_weights
from dayshift.experiments.yaml_tree import (
    ConfigError,
    Node,
    describe,
    dump_annotated,
    leaf_origins,
    merge,
    parse,
    put,
    read_file,
)
from dayshift.planner.memory import MemoryArm
from dayshift.sim.tasks import DEFAULT_SUITE, UnknownTaskError, find_task

_COMMAND_LINE = "--set"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Keys of a fault that its kind does not look at.
_WITHOUT_EFFECT = {"short_budget": ("at_step", "num_steps"), "blocked_view": ("strength",)}
_PACKAGED = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Arm:
    """One run of an experiment file. `label` says what sets it apart ("" without a matrix)."""

    label: str
    experiment: Experiment
    tree: Node  # what was written, with origins: for messages and `annotated`

    def annotated(self) -> str:
        """The resolved configuration as YAML, with where each value came from."""
        return dump_annotated(self.experiment.resolved(), self.tree)

    def origins(self) -> dict[str, str]:
        """Where each value that somebody wrote came from, by dotted path."""
        return {dotted(path): origin for path, origin in leaf_origins(self.tree)}

    def mistake(self, path: Sequence[str | int], text: str) -> ConfigError:
        """A ConfigError about the value at `path`."""
        return mistake(self.tree, path, text)


def load_arms(path: Path, settings: Sequence[str] = ()) -> tuple[Arm, ...]:
    """The arms of an experiment file, in the matrix's order. Raises ConfigError.

    `path` is a file, or the name of one of the experiments that come with Dayshift. `settings` are
    the `a.b=c` of the command line; the value is YAML.
    """
    tree = _read_with_bases(_locate(path), ())
    for setting in settings:
        tree = _apply(tree, setting)
    return tuple(_check(label, arm) for label, arm in _expand(tree))


def packaged_experiments() -> tuple[str, ...]:
    """Names of the experiments that come with Dayshift."""
    return tuple(sorted(file.stem for file in _PACKAGED.glob("*.yaml")))


def packaged_text(name: str) -> str:
    """The YAML of an experiment that comes with Dayshift."""
    return (_PACKAGED / f"{name}.yaml").read_text(encoding="utf-8")


def _locate(path: Path) -> Path:
    if path.is_file():
        return path
    packaged = _PACKAGED / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.parent == Path() and packaged.is_file():
        return packaged
    raise ConfigError(
        f"{path}: no such file; experiments that come with Dayshift: {', '.join(packaged_experiments())}"
    )


def _read_with_bases(path: Path, readers: tuple[Path, ...]) -> Node:
    """A file's tree on top of the file that it extends."""
    tree = read_file(path, str(path))
    assert isinstance(tree.value, dict)
    if (base := tree.value.pop("extends", None)) is None:
        return tree
    if not isinstance(base.value, str):
        raise ConfigError(
            f"{base.origin}: extends: found {describe(base.plain())}, allowed: the path of a YAML file"
        )
    base_path = path.parent / base.value
    chain = (*readers, path.resolve())
    if base_path.resolve() in chain:
        raise ConfigError(f"{base.origin}: extends: {base.value} extends this file in turn")
    if not base_path.is_file():
        raise ConfigError(f"{base.origin}: extends: no such file: {base_path}")
    return merge(_read_with_bases(base_path, chain), tree)


def _apply(tree: Node, setting: str) -> Node:
    """The tree with one `a.b=c` of the command line in it."""
    name, equals, text = setting.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{_COMMAND_LINE}: found {setting!r}, allowed: a.b=c (a dotted path, then a value)")
    if keys[0] == "extends":
        raise ConfigError(f"{_COMMAND_LINE}: extends can only be written in a file")
    value = parse(text, f"{_COMMAND_LINE} {name.strip()}", with_lines=False)
    if keys[0] == "matrix" and len(keys) > 1:
        keys = ["matrix", ".".join(keys[1:])]
    _refuse_matrix_key(tree, keys, value.origin)
    return put(tree, keys, value)


def _refuse_matrix_key(tree: Node, keys: Sequence[str], origin: str) -> None:
    """A value that the matrix sets anyway would be set without effect."""
    matrix = tree.value.get("matrix") if isinstance(tree.value, dict) else None
    if matrix and isinstance(matrix.value, dict) and (name := ".".join(keys)) in matrix.value:
        raise ConfigError(
            f"{origin}: {name} is an axis of the matrix ({matrix.value[name].origin}); "
            f"set the axis (--set matrix.{name}=[…]) or drop the matrix (--set matrix=null)"
        )


def _expand(tree: Node) -> list[tuple[str, Node]]:
    """(label, tree) of each arm."""
    assert isinstance(tree.value, dict)
    rest = Node({key: child for key, child in tree.value.items() if key != "matrix"}, tree.origin)
    matrix = tree.value.get("matrix")
    if matrix is None or matrix.value is None:
        return [("", rest)]
    if not isinstance(matrix.value, dict) or not matrix.value:
        raise mistake(
            tree, ("matrix",), f"found {describe(matrix.plain())}, allowed: dotted paths with lists of values"
        )
    axes: list[list[tuple[str, Node]]] = []
    for path, values in matrix.value.items():
        if not isinstance(values.value, list) or not values.value:
            raise mistake(
                tree, ("matrix", path), f"found {describe(values.plain())}, allowed: a list of values"
            )
        if path.split(".")[0] not in Experiment.model_fields:
            raise mistake(
                tree, ("matrix", path), not_one_of(path.split(".")[0], list(Experiment.model_fields))
            )
        axes.append([(path, value) for value in values.value])
    arms = []
    for choice in itertools.product(*axes):
        arm = rest
        for path, value in choice:
            arm = put(arm, path.split("."), value)
        arms.append((_label(choice), arm))
    _refuse_twins(tree, [label for label, _ in arms])
    return arms


def _label(choice: Sequence[tuple[str, Node]]) -> str:
    """What sets an arm apart, such as "memory=window, seed=1"."""
    words = [value.value if isinstance(value.value, str) else describe(value.plain()) for _, value in choice]
    return ", ".join(
        f"{path.rsplit('.', 1)[-1]}={word}" for (path, _), word in zip(choice, words, strict=True)
    )


def _refuse_twins(tree: Node, labels: Sequence[str]) -> None:
    twins = [label for label in labels if labels.count(label) > 1]
    if twins:
        raise mistake(tree, ("matrix",), f"two arms are the same: {twins[0]}")


def folder_name(label: str) -> str:
    """An arm's label as the name of a folder: "memory-window_seed-1"."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label.replace(", ", "_")).strip("-")


def _check(label: str, tree: Node) -> Arm:
    """The arm's experiment, or the first mistake in it."""
    try:
        # JSON mode is strict about types and still reads enums from words, tuples from lists.
        experiment = Experiment.model_validate_json(json.dumps(tree.plain()), strict=True)
    except ValidationError as error:
        raise as_config_error(error, Experiment, tree) from error
    arm = Arm(label, experiment, tree)
    _check_tasks(arm)
    _check_model(arm)
    _check_faults(arm)
    _check_servers(arm)
    _check_policy(arm)
    return arm


def _check_tasks(arm: Arm) -> None:
    """Every task that is named is one of LIBERO-Goal's."""
    experiment = arm.experiment
    named: list[tuple[tuple[str | int, ...], str]] = []
    for i, shift in enumerate(experiment.plan.shifts or ()):
        named += [
            (("plan", "shifts", i, j, k), task) for j, job in enumerate(shift) for k, task in enumerate(job)
        ]
    named += [(("plan", "tasks", i), task) for i, task in enumerate(experiment.plan.tasks or ())]
    named += [(("faults", i, "task"), fault.task) for i, fault in enumerate(experiment.faults) if fault.task]
    for path, name in named:
        try:
            task = find_task(name)
        except UnknownTaskError as error:
            raise arm.mistake(path, str(error)) from error
        if task.suite != DEFAULT_SUITE:
            raise arm.mistake(path, f"found a task of {task.suite}, allowed: tasks of {DEFAULT_SUITE}")


def _check_model(arm: Arm) -> None:
    """A folder is there and holds a model; whether a hub has an id, only the engine finds out."""
    model, planner = arm.experiment.planner.model, arm.experiment.planner
    if planner.base_url or arm.experiment.engine.url or planner.memory is MemoryArm.ORACLE:
        return
    if model != DEFAULT_MODEL and not _HUB_ID.fullmatch(model) and not Path(model).expanduser().is_dir():
        allowed = f"{DEFAULT_MODEL}, a folder with a model, or a hub's id such as Qwen/Qwen3-4B"
        raise arm.mistake(("planner", "model"), f"no such folder: {model}; allowed: {allowed}")
    folder = Path(model).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise arm.mistake(("planner", "model"), f"no model in folder {model}: it has no config.json")


def _check_policy(arm: Arm) -> None:
    """A checkpoint's folder is there, and so is a server for it."""
    policy = arm.experiment.policy
    if policy.kind != "smolvla" or policy.url is not None:
        return
    if arm.experiment.engine.url is not None:
        raise arm.mistake(("policy",), "beside engine.url, policy.url must name the server of the policy")
    weights = policy_weights(policy)
    if not _HUB_ID.fullmatch(weights) and not (Path(weights).expanduser() / "config.json").is_file():
        raise arm.mistake(
            ("policy",), f"no SmolVLA checkpoint at {weights}; policy.weights takes a folder or a hub's id"
        )


def _check_faults(arm: Arm) -> None:
    """A fault that can hold for no step, and a key that its kind ignores, are slips of the pen."""
    shape, rules = arm.experiment.plan.shape, arm.experiment.rules
    for i, fault in enumerate(arm.experiment.faults):
        limits = {
            "robot": (fault.robot, arm.experiment.robots.live),
            "shift": (fault.shift, len(shape)),
            "job": (fault.job, max(len(shift) for shift in shape)),
            "step": (fault.step, max(num_steps for shift in shape for num_steps in shift)),
            "attempts": (
                max(fault.attempts, default=None) if fault.attempts else None,
                rules.max_attempts,
            ),
        }
        for key, (found, largest) in limits.items():
            if found is not None and found > largest:
                raise arm.mistake(("faults", i, key), f"found {found}, allowed: 1 to {largest}")
        for key in _WITHOUT_EFFECT.get(fault.kind, ()):
            if getattr(fault, key) is not None:
                raise arm.mistake(("faults", i, key), f"has no effect on {fault.kind}; remove it")
        if fault.kind == "short_budget" and (fault.strength or 0) > 1:
            raise arm.mistake(("faults", i, "strength"), f"found {fault.strength}, allowed: at most 1")
        if (last := arm.experiment.sim.max_steps - 1) < (fault.at_step or 0):
            raise arm.mistake(("faults", i, "at_step"), f"found {fault.at_step}, allowed: 0 to {last}")


def _check_servers(arm: Arm) -> None:
    planner, engine = arm.experiment.planner, arm.experiment.engine
    if planner.base_url and planner.memory not in ("full", "off"):
        raise arm.mistake(
            ("planner", "memory"),
            f"found {planner.memory.value!r}, allowed with planner.base_url: full, off "
            "(the others need the sessions of our engine)",
        )
    if planner.base_url and engine.url:
        raise arm.mistake(("engine", "url"), "has no effect beside planner.base_url; remove one of them")
    if planner.api_key_env and not planner.base_url:
        raise arm.mistake(
            ("planner", "api_key_env"), f"has no effect without {dotted(('planner', 'base_url'))}"
        )
