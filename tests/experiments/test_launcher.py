from __future__ import annotations

from pathlib import Path

import pytest

from dayshift.experiments.launcher import ProcessLauncher
from dayshift.types import DayshiftError


def test_every_offered_experiment_can_be_started_as_it_is(tmp_path: Path) -> None:
    launcher = ProcessLauncher(tmp_path)
    offered = launcher.experiments()
    assert "quickstart" in offered
    assert "quickstart_memory" not in offered  # it extends a file that a pasted text does not have
    for text in offered.values():
        launcher.check(text)


@pytest.mark.parametrize(
    ("yaml", "reason"),
    [("nmae: x\n", "nmae"), ("robots: {live: 0}\n", "robots.live"), ("a: [", "line 1")],
)
def test_a_mistake_is_told_in_one_line_without_a_path_of_ours(tmp_path: Path, yaml: str, reason: str) -> None:
    with pytest.raises(DayshiftError, match=reason) as caught:
        ProcessLauncher(tmp_path).start(yaml)
    assert "\n" not in str(caught.value)
    assert "/tmp" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []  # nothing was started


def test_the_schema_is_that_of_an_experiment(tmp_path: Path) -> None:
    assert {"robots", "plan", "planner", "sim"} <= set(ProcessLauncher(tmp_path).schema()["properties"])
