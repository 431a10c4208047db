"""docs/experiments.md says what the models say."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import yaml

from dayshift.experiments.config import Experiment, RulesConfig
from dayshift.experiments.loading import load_arms
from dayshift.experiments.reference import with_reference
from dayshift.planner.memory import MemoryArm
from dayshift.planner.rules import Rules

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "experiments.md"


def test_the_reference_is_up_to_date():
    page = PAGE.read_text(encoding="utf-8")
    assert with_reference(page) == page, "run: python -m dayshift.experiments.reference docs/experiments.md"


def test_every_memory_arm_is_explained():
    page = PAGE.read_text(encoding="utf-8")
    assert set(
        re.findall(r"^\| `(\w+)` \| .*(?:session|window|history|message|script|text)", page, re.M)
    ) >= set(MemoryArm)


def test_the_example_of_the_page_loads(tmp_path):
    example = re.search(r"```yaml\n# mine\.yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert example
    body = yaml.safe_load(example[1])
    body["extends"] = str(ROOT / body["extends"])
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(body))
    (arm,) = load_arms(tmp_path / "mine.yaml")
    assert arm.experiment.planner.window == 4096
    assert [fault.shift for fault in arm.experiment.faults] == [2]


def test_the_rules_of_the_file_are_the_planners_rules():
    assert [field.name for field in fields(Rules)] == list(RulesConfig.model_fields)
    assert Rules(**dict(Experiment().rules)) == Rules()
