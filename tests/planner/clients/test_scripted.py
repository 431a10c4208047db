"""The scripted planner reads what `protocol` writes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayshift.planner.clients.scripted import ScriptedPlanner
from dayshift.planner.jobs import JobStep
from dayshift.planner.protocol import (
    COMMAND_SCHEMA,
    Execute,
    GiveUp,
    Next,
    Redo,
    done_message,
    failed_message,
    parse_command,
    parse_review,
    redo_message,
    repair_message,
    review_message,
    step_message,
)
from dayshift.planner.scores import compute_scores
from dayshift.types import Outcome, StepKey

keys = st.builds(StepKey, st.integers(1, 999), st.integers(1, 99), st.integers(1, 99))
tasks = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1, max_size=120)
steps = st.builds(JobStep, keys, tasks)


def ask(planner, message):
    return planner.ask(message, at=0.0, schema=COMMAND_SCHEMA, max_tokens=96).text


@settings(deadline=None)
@given(step=steps, error=st.text())
def test_follows_the_protocol_for_any_step(step, error):
    planner = ScriptedPlanner(remembers=True)
    key = step.key
    assert parse_command(ask(planner, step_message(step))) == Execute(step.task)
    assert parse_command(ask(planner, failed_message(1, 2))) == Execute(step.task)
    assert parse_command(ask(planner, failed_message(2, 2))) == GiveUp(key, step.task)
    assert parse_command(ask(planner, repair_message(error))) == GiveUp(key, step.task)
    expected = Redo(((key.job, key.step, step.task),))
    assert parse_review(ask(planner, review_message(key.shift))) == expected
    assert parse_command(ask(planner, redo_message(step))) == Execute(step.task)
    assert parse_command(ask(planner, done_message())) == Next()


@pytest.mark.parametrize(("remembers", "redone"), [(True, 1), (False, 0)])
def test_the_oracle_remembers_and_its_counterpart_does_not(rig, remembers, redone):
    failed = {"r0-1.1.2-w1": Outcome.FAILED, "r0-1.1.2-w2": Outcome.FAILED}
    r = rig(planner=ScriptedPlanner(remembers=remembers), outcomes=failed)
    r.run()
    scores = compute_scores([r.records])
    assert (scores.steps_completed, scores.given_up, scores.redone) == (7, 1, redone)


def test_a_step_given_up_in_its_redo_is_listed_once(rig, plan):
    r = rig(shifts=plan(1, 1, 1), outcomes=lambda attempt_id: Outcome.FAILED)
    r.run()
    planner = ScriptedPlanner(remembers=True)
    planner.open("r0", r.records.exchanges)
    assert len(parse_review(ask(planner, review_message(1))).steps) == 1
