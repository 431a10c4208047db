"""extends:, matrix:, --set, and every kind of mistake in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.experiments.config import Experiment
from dayshift.experiments.loading import folder_name, load_arms, packaged_experiments
from dayshift.experiments.yaml_tree import ConfigError
from dayshift.planner.memory import MemoryArm

# Dotted paths and valid values for them.
VALID = {
    "name": st.sampled_from(["a", "b-2"]),
    "seed": st.integers(0, 99),
    "planner.memory": st.sampled_from([arm.value for arm in MemoryArm]),
    "planner.window": st.integers(128, 10_000),
    "planner.temperature": st.floats(0, 2),
    "rules": st.fixed_dictionaries({"max_attempts": st.integers(2, 5)}),
    "rules.max_repairs": st.integers(0, 5),
    "rules.planner_retry_delays_s": st.lists(st.floats(0, 9), max_size=2),
    "sim.camera_hz": st.integers(0, 20),
    "plan.tasks": st.lists(st.sampled_from(["turn on the stove", "put the bowl on the plate"]), min_size=1),
    "faults": st.lists(
        st.fixed_dictionaries({"kind": st.sampled_from(["push", "gripper_slip"])}), max_size=2
    ),
    "engine.device": st.sampled_from(["auto", "cpu"]),
}
settings_of_values = st.dictionaries(st.sampled_from(sorted(VALID)), st.none(), max_size=5).flatmap(
    lambda chosen: st.fixed_dictionaries({path: VALID[path] for path in chosen})
)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def nested(path: str, value):
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(settings_of_values)
def test_set_equals_an_edit_in_the_file(tmp_path, values):
    """`--set` on the command line, and files that extend each other, mean the same."""
    base = write(
        tmp_path, "base.yaml", "name: base\nplanner: {window: 700}\nfaults: [{kind: push, shift: 1}]\n"
    )
    by_set = load_arms(base, [f"{path}={yaml.safe_dump(value)}" for path, value in values.items()])
    newest = base
    for number, (path, value) in enumerate(values.items()):
        text = yaml.safe_dump({"extends": newest.name, **nested(path, value)})
        newest = write(tmp_path, f"edit{number}.yaml", text)
    by_file = load_arms(newest)
    assert [arm.experiment for arm in by_set] == [arm.experiment for arm in by_file]


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(settings_of_values)
def test_the_resolved_configuration_loads_as_the_same_experiment(tmp_path, values):
    arm = load_arms(write(tmp_path, "a.yaml", ""), [f"{p}={yaml.safe_dump(v)}" for p, v in values.items()])[0]
    saved = write(tmp_path, "saved.yaml", arm.annotated())
    assert load_arms(saved)[0].experiment == arm.experiment


def test_an_empty_file_is_an_experiment_of_defaults(tmp_path):
    (arm,) = load_arms(write(tmp_path, "e.yaml", "# nothing\n"))
    assert arm.experiment == Experiment()
    assert arm.label == ""


def test_extends_merges_mappings_and_replaces_lists(tmp_path):
    (tmp_path / "below").mkdir()
    write(tmp_path, "base.yaml", "sim: {max_steps: 50, camera_hz: 2}\nfaults: [{kind: push}, {kind: push}]\n")
    path = write(
        tmp_path / "below",
        "x.yaml",
        "extends: ../base.yaml\nsim: {camera_hz: 4}\nfaults: [{kind: gripper_slip}]\n",
    )
    (arm,) = load_arms(path)
    assert (arm.experiment.sim.max_steps, arm.experiment.sim.camera_hz) == (50, 4)
    assert [fault.kind for fault in arm.experiment.faults] == ["gripper_slip"]
    assert "max_steps: 50" in (line := _line(arm.annotated(), "max_steps"))
    assert line.endswith("base.yaml:1")
    assert _line(arm.annotated(), "image_size").endswith("# default")


def test_a_matrix_makes_one_arm_per_combination(tmp_path):
    path = write(tmp_path, "m.yaml", "matrix:\n  planner.memory: [off, full]\n  seed: [3, 4]\n")
    arms = load_arms(path)
    assert [(arm.label, arm.experiment.planner.memory.value, arm.experiment.seed) for arm in arms] == [
        ("memory=off, seed=3", "off", 3),
        ("memory=off, seed=4", "off", 4),
        ("memory=full, seed=3", "full", 3),
        ("memory=full, seed=4", "full", 4),
    ]
    assert folder_name(arms[0].label) == "memory-off_seed-3"
    assert _line(arms[3].annotated(), "memory").endswith("m.yaml:2")


def test_a_matrix_can_be_set_extended_and_dropped(tmp_path):
    write(tmp_path, "base.yaml", "matrix: {seed: [1, 2]}\n")
    path = write(tmp_path, "more.yaml", "extends: base.yaml\nmatrix: {planner.memory: [off, full]}\n")
    assert len(load_arms(path)) == 4
    assert len(load_arms(path, ["matrix.seed=[7]"])) == 2
    assert len(load_arms(path, ["matrix=null"])) == 1
    assert len(load_arms(path, ["matrix.faults=[[], [{kind: push}]]"])) == 8


def test_packaged_experiments_are_found_by_name_and_are_sound():
    assert {"quickstart", "quickstart_memory", "shift_review_16"} <= set(packaged_experiments())
    for name in packaged_experiments():
        assert load_arms(Path(name)) == load_arms(Path(f"{name}.yaml"))


MISTAKES = [
    # (file, settings, the whole message after the path of the file, or a part that starts with "…")
    ("planer: {}", [], ":1: planer: unknown key; did you mean 'planner'? allowed: name, seed, robots, "
     "plan, planner, rules, policy, sim, faults, engine, record, extends, matrix"),
    ("planner:\n  memry: off", [], ":2: planner.memry: unknown key; did you mean 'memory'? allowed: model, "
     "memory, dialect, window, temperature, base_url, api_key_env, timeout_s"),
    ("planner:\n  memory: windo", [], ":2: planner.memory: found 'windo' (did you mean 'window'?), allowed: "
     "off, window, full, recall_text, recall_kv, oracle"),
    ("planner: {window: '768'}", [], ":1: planner.window: found '768', allowed: a whole number"),
    ("planner: {window: 7.5}", [], ":1: planner.window: found 7.5, allowed: a whole number"),
    ("planner: {window: 5}", [], ":1: planner.window: found 5, allowed: greater than or equal to 128"),
    ("seed: true", [], ":1: seed: found true, allowed: a whole number"),
    ("sim: {camera_hz: .nan}", [], ":1: sim.camera_hz: found .nan, allowed: a finite number"),
    ("sim: 3", [], ":1: sim: found 3, allowed: keys and values"),
    ("faults: {kind: push}", [], ":1: faults: found a mapping, allowed: a list"),
    ("faults:\n- kind: push\n- shift: 1", [], ":3: faults.1.kind: missing; it has to be given"),
    ("faults:\n- kind: push\n- {kind: slip_gripper}", [], ":3: faults.1.kind: found 'slip_gripper', allowed: "
     "gripper_slip, push, short_budget, blocked_view"),
    ("faults:\n- {kind: push, shift: 4}", [], ":2: faults.0.shift: found 4, allowed: 1 to 3"),
    ("faults: [{kind: push, attempts: [9]}]", [], ":1: faults.0.attempts: found 9, allowed: 1 to 2"),
    ("name: a/b", [], "…name: found 'a/b', allowed: text that matches"),
    ("plan: {shifts: [[[turn on stove]]]}", [], ":1: plan.shifts.0.0.0: unknown task 'turn on stove' in "
     "libero_goal; did you mean: turn on the stove"),
    ("plan: {tasks: [fly]}", [], "…plan.tasks.0: unknown task 'fly' in libero_goal; allowed: open "),
    ("faults: [{kind: blocked_view, strength: 3}]", [], ":1: faults.0.strength: has no effect on "
     "blocked_view; remove it"),
    ("faults: [{kind: short_budget, at_step: 0}]", [], ":1: faults.0.at_step: has no effect on "
     "short_budget; remove it"),
    ("faults: [{kind: short_budget, strength: 3}]", [], ":1: faults.0.strength: found 3.0, allowed: at "
     "most 1"),
    ("faults: [{kind: push, at_step: 300}]", [], ":1: faults.0.at_step: found 300, allowed: 0 to 299"),
    ("faults: [{kind: push, task: fly}]", [], "…faults.0.task: unknown task 'fly'"),
    ("plan: {shifts: [[[turn on the stove]]], num_shifts: 2}", [], ":1: plan: shifts writes the plan out, so "
     "num_shifts cannot be set too"),
    ("plan: {shifts: []}", [], ":1: plan.shifts: found [], allowed: at least 1 item(s)"),
    ("seed: -1\nname: 3", [], "…(and 1 more mistake)"),
    ("planner: {base_url: 'http://h/v1'}", [], "…planner.memory: found 'recall_kv', allowed with "
     "planner.base_url: full, off"),
    ("planner: {base_url: h/v1, memory: full}", [], "…planner.base_url: found 'h/v1', allowed: text that "
     "matches ^https?://"),
    ("engine: {url: 'localhost:8000'}", [], "…engine.url: found 'localhost:8000', allowed: text that matches "
     "^https?://"),
    ("policy: {kind: smolvla, url: 'ftp://x'}", [], "…policy.url: found 'ftp://x', allowed: text that "
     "matches ^(https?|wss?)://"),
    ("record: {database: runs.db}", [], "…record.database: found 'runs.db', allowed: text that matches "),
    ("planner: {api_key_env: KEY}", [], ":1: planner.api_key_env: has no effect without planner.base_url"),
    ("planner: {model: /no/such}", [], ":1: planner.model: no such folder: /no/such; allowed: default, a "
     "folder with a model, or a hub's id such as Qwen/Qwen3-4B"),
    ("planner: {model: /}", [], ":1: planner.model: no model in folder /: it has no config.json"),
    ("extends: nowhere.yaml", [], "…extends: no such file"),
    ("extends: [a]", [], ":1: extends: found [a], allowed: the path of a YAML file"),
    ("extends: x.yaml", [], ":1: extends: x.yaml extends this file in turn"),
    ("matrix: {seed: 3}", [], ":1: matrix.seed: found 3, allowed: a list of values"),
    ("matrix: {seed: []}", [], ":1: matrix.seed: found [], allowed: a list of values"),
    ("matrix: [seed]", [], ":1: matrix: found [seed], allowed: dotted paths with lists of values"),
    ("matrix: {sed: [1]}", [], "…matrix.sed: found 'sed' (did you mean 'seed'?), allowed: name"),
    ("matrix: {seed: [1, 1]}", [], ":1: matrix: two arms are the same: seed=1"),
    ("matrix:\n  planner.memory: [full, al]", [], "…:2: planner.memory: found 'al', allowed: off"),
    ("- 1", [], ": found [1], expected keys and values"),
    ("", ["planner.memory=al"], "=--set planner.memory: found 'al', allowed: off, window, full, "
     "recall_text, recall_kv, oracle"),
    ("", ["planner.memory"], "=--set: found 'planner.memory', allowed: a.b=c (a dotted path, then a value)"),
    ("", ["planner..memory=off"], "=--set: found 'planner..memory=off', allowed: a.b=c (a dotted path, then "
     "a value)"),
    ("", ["extends=x"], "=--set: extends can only be written in a file"),
    ("", ["faults.0.kind=push"], "…--set faults.0.kind: "),
    ("seed: 1", ["seed.x=push"], "=--set seed.x: no key 'x' in 1"),
    ("matrix: {seed: [1, 2]}", ["seed=3"], "…--set seed: seed is an axis of the matrix"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "set_options", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_place_found_and_allowed(tmp_path, text, set_options, message):
    path = write(tmp_path, "x.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_arms(path, set_options)
    found = str(caught.value)
    assert "\n" not in found
    match message[0]:
        case "…":
            assert message[1:] in found
        case "=":
            assert found == message[1:]
        case _:
            assert found == f"{path}{message}"


def test_a_missing_file_names_the_experiments_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file; .*quickstart"):
        load_arms(tmp_path / "nothing.yaml")


def _line(text: str, key: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
