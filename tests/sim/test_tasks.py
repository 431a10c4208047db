from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.sim.tasks import UnknownTaskError, find_task, list_tasks, load_init_states


def test_libero_goal_has_its_ten_tasks_in_order() -> None:
    assert [task.index for task in list_tasks()] == list(range(10))
    assert find_task(0).sentence == "open the middle drawer of the cabinet"
    assert find_task(7).name == "turn_on_the_stove"


@given(st.sampled_from(list_tasks()), st.sampled_from(["name", "sentence", "index", "name_in_suite"]))
def test_a_task_is_found_by_name_sentence_number_and_suite(task, key) -> None:
    assert find_task(getattr(task, key)) == task


def test_case_spaces_and_a_full_stop_do_not_matter() -> None:
    assert find_task("  Put the bowl  on the plate. ").name == "put_the_bowl_on_the_plate"


def test_other_suites_by_prefix() -> None:
    assert find_task("libero_spatial/0").suite == "libero_spatial"


def test_an_unknown_task_is_one_line_with_the_closest_ones() -> None:
    with pytest.raises(UnknownTaskError) as error:
        find_task("put the bowl on the plant")
    assert "'put the bowl on the plant'" in str(error.value)
    assert "put the bowl on the plate" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_task_like_no_other_lists_what_is_allowed() -> None:
    with pytest.raises(UnknownTaskError, match=r"allowed: .*turn on the stove"):
        find_task("xyzzy")


def test_an_unknown_suite_lists_what_is_allowed() -> None:
    with pytest.raises(UnknownTaskError, match="libero_goal"):
        find_task("libero_gaol/0")


def test_every_task_has_fifty_initial_states() -> None:
    assert {load_init_states(task).shape for task in list_tasks()} == {(50, 79)}
