"""The database store keeps what the planner's store in memory keeps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayshift.dataset_export.store import RunStore
from dayshift.engine.api import FinishReason, RecallRange, TokenLedger
from dayshift.experiments.records import DatabaseStore
from dayshift.planner.jobs import Attempt, AttemptResult, Job, JobStep, ReviewAnswer, Shift
from dayshift.planner.records import AttemptRecord, Exchange, ShiftHours, StepRecord, StepState
from dayshift.planner.store import InMemoryStore
from dayshift.types import GiveUpReason, Outcome, StepKey

small = st.integers(1, 3)
seconds = st.floats(0, 1e6)
counts = st.integers(0, 2**40)
turns = st.lists(st.integers(0, 99), max_size=3).map(tuple)
robots = st.sampled_from(["robot-1", "robot-2"])
keys = st.builds(StepKey, small, small, small)
steps = keys.map(lambda key: JobStep(key, f"task of {key}"))
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
ledgers = st.builds(TokenLedger, computed=counts, recalled=counts, reused=counts, prefill_ms=seconds)

writes = st.one_of(
    st.tuples(
        st.just("save_step"),
        st.builds(
            StepRecord,
            robot=robots,
            step=steps,
            is_review=st.booleans(),
            state=st.sampled_from(StepState),
            num_attempts=small,
            num_infra_attempts=small,
            reason=st.none() | st.sampled_from(GiveUpReason),
        ),
    ),
    st.tuples(
        st.just("save_hours"),
        st.builds(
            ShiftHours,
            robot=robots,
            shift=small,
            is_review=st.booleans(),
            start_s=seconds,
            end_s=st.none() | seconds,
        ),
    ),
    st.tuples(
        st.just("add_exchange"),
        st.builds(
            Exchange,
            robot=robots,
            index=small,
            shift=small,
            is_review=st.booleans(),
            step=st.none(),
            num_attempts=small,
            is_repair=st.booleans(),
            at=seconds,
            message=texts,
            reply=texts,
            finish_reason=st.sampled_from(FinishReason),
            ledger=ledgers,
            recall_range=st.none() | st.builds(RecallRange, seconds, seconds),
            recalled_turns=turns,
            present_turns=turns,
            not_fitting_turns=turns,
            latency_s=seconds,
            num_retries=small,
            problem=texts,
            error=texts,
        ),
    ),
    st.tuples(
        st.just("add_attempt"),
        st.builds(
            AttemptRecord,
            attempt=st.builds(
                Attempt,
                attempt_id=st.sampled_from(["a", "b", "c"]),
                robot=robots,
                step=steps,
                number=small,
                is_review=st.booleans(),
                instruction=texts,
            ),
            result=st.builds(
                AttemptResult,
                outcome=st.sampled_from([Outcome.DONE, Outcome.FAILED, Outcome.INFRA]),
                num_control_steps=counts,
                detail=texts,
            ),
            start_s=seconds,
            end_s=seconds,
        ),
    ),
)


key_tuples = st.lists(keys, max_size=3).map(tuple)
review_answers = st.builds(
    ReviewAnswer,
    shift=small,
    steps=key_tuples,
    is_valid=st.booleans(),
    refused=key_tuples,
    mismatched=key_tuples,
)


@pytest.fixture
def rows(tmp_path):
    with RunStore(f"sqlite:///{tmp_path}/run.db", "run") as store:
        yield store


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(writes, max_size=8), st.lists(review_answers, max_size=2))
def test_the_database_holds_what_memory_holds(tmp_path_factory, calls, answers):
    memory = InMemoryStore()
    with RunStore(f"sqlite:///{tmp_path_factory.mktemp('db')}/run.db", "run") as rows:
        database = DatabaseStore(rows)
        for name, record in calls:
            getattr(memory, name)(record)
            getattr(database, name)(record)
        for answer in answers:
            memory.save_answer("robot-1", answer)
            database.save_answer("robot-1", answer)
        for robot in ("robot-1", "robot-2"):
            assert _sets(database.load(robot)) == _sets(memory.load(robot))


def _sets(records):
    return {
        name: {repr(record) for record in getattr(records, name)}
        for name in ("steps", "hours", "exchanges", "attempts", "answers")
    }


def test_a_plan_is_rebuilt_from_its_steps(rows):
    plan = tuple(
        Shift(
            s,
            tuple(
                Job(j, tuple(JobStep(StepKey(s, j, k), f"task {s}{j}{k}") for k in range(1, 12)))
                for j in range(1, 4)
            ),
        )
        for s in range(1, 12)
    )
    store = DatabaseStore(rows)
    store.save_plan("robot-1", plan)
    store.save_step(StepRecord(robot="robot-1", step=plan[0].steps[0], is_review=True, state=StepState.DONE))
    assert store.load("robot-1").shifts == plan
    assert store.load("robot-2").shifts == ()


def test_an_exchange_about_a_step_keeps_its_step(rows):
    store = DatabaseStore(rows)
    exchange = Exchange(
        robot="robot-1", index=1, shift=2, is_review=False, step=StepKey(2, 1, 3), num_attempts=0,
        is_repair=False, at=1.0, message="m", reply="r", finish_reason=FinishReason.STOP,
        ledger=TokenLedger(),
    )  # fmt: skip
    store.add_exchange(exchange)
    assert store.load("robot-1").exchanges == (exchange,)
