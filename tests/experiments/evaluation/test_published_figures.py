"""docs/policy.md says what the committed episodes say."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from dayshift.experiments.evaluation.statistics import mcnemar, wilson_interval

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
Row = dict[str, str]


def episodes(name: str) -> list[Row]:
    with (ROOT / "benchmarks" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def groups(rows: Sequence[Row], *names: str) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def done(rows: Sequence[Row]) -> str:
    return f"{sum(row['outcome'] == 'done' for row in rows)}/{len(rows)}"


def interval(rows: Sequence[Row], digits: int) -> str:
    low, high = wilson_interval(sum(row["outcome"] == "done" for row in rows), len(rows))
    return f"{100 * low:.{digits}f} to {100 * high:.{digits}f} %"


def compared(some: Sequence[Row], others: Sequence[Row]) -> tuple[str, str, str]:
    """In how many pairs only one of the two succeeded, and McNemar's p."""
    one, two = (
        {(row["task"], row["init_state_id"], row["seed"]): row["outcome"] == "done" for row in rows}
        for rows in (some, others)
    )
    assert one.keys() == two.keys()
    test = mcnemar([(is_done, two[start]) for start, is_done in one.items()])
    return str(test.only_first), str(test.only_second), f"{test.p_value:#.2g}"


def assert_has_row(*cells: str) -> None:
    """The page has a table's row with these cells in this order, others between them or not."""
    pattern = r"\|" + r"(.*\|)?".join(re.escape(f" {cell} |") for cell in cells)
    rows = [line.replace("*", "") for line in PAGE.splitlines()]
    assert any(re.search(pattern, row) for row in rows), cells


def test_the_default_policy() -> None:
    rows = episodes("policy_libero_goal.csv")
    for (instruction,), of_task in groups(rows, "instruction").items():
        assert_has_row(instruction, done(of_task))
    assert_has_row("all", done(rows), interval(rows, 1))
    steps = sum(int(row["num_control_steps"]) for row in rows) / len(rows)
    assert f"{steps:.0f} control steps and" in PAGE


def test_actions_used_of_a_chunk() -> None:
    found = groups(episodes("policy_n_action_steps.csv"), "n_action_steps")
    assert len(found) == 4
    for (n_action_steps,), rows in found.items():
        assert_has_row(n_action_steps, done(rows), interval(rows, 0))
    both = [row for row in episodes("policy_libero_goal.csv") if row["init_state_id"] in ("40", "41")]
    assert_has_row("8, the default", done(both), interval(both, 0))


def test_the_training_loop() -> None:
    names = ("base_control_steps", "states", "further_updates", "batch_size")
    for (base, states, num_updates, batch_size), rows in groups(
        episodes("training_loop.csv"), *names
    ).items():
        of_policy = {policy: of for (policy,), of in groups(rows, "policy").items()}
        is_first_base = base == "5110"
        if is_first_base or states == "met":
            for policy, of in of_policy.items():
                assert_has_row(policy, done(of), *([] if is_first_base else [interval(of, 1)]))
        if "operation" not in of_policy:  # before any further training
            continue
        control, operation = of_policy["control"], of_policy["operation"]
        difference = compared(operation, control)
        updates = f"{int(num_updates):,}" + ("" if is_first_base else f" of {batch_size}")
        if is_first_base or states == "met":
            assert_has_row(updates, "operation", done(operation), *difference)
            assert_has_row(updates, "control", done(control))
        else:
            assert_has_row(updates, done(control), done(operation), *difference)
