import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayshift.engine.router.fanout import merged, totals
from dayshift.engine.router.fleet import EngineState, Fleet
from dayshift.types import DayshiftError

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"]


def ready_fleet(max_known_sessions: int = 100) -> Fleet:
    fleet = Fleet(URLS, max_known_sessions=max_known_sessions)
    for engine in fleet.engines:
        engine.state = EngineState.READY
    return fleet


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(-1, 2))))
def test_the_table_is_a_dict_that_forgets_the_least_recently_called(operations: list[tuple[str, int]]):
    fleet, model = ready_fleet(max_known_sessions=4), {}
    for session_id, index in operations:
        before = model.pop(session_id, None)
        if index < 0:
            fleet.forget(session_id)
            continue
        moved_from = fleet.learn(session_id, fleet.engines[index])
        assert moved_from is (None if before in (None, index) else fleet.engines[before])
        model[session_id] = index
        if len(model) > 4:
            del model[next(iter(model))]
    for session_id in "abcdefgh":
        holder = fleet.holder_of(session_id)
        assert holder is (fleet.engines[model[session_id]] if session_id in model else None)
    for index, engine in enumerate(fleet.engines):
        assert engine.num_sessions == list(model.values()).count(index)


def test_new_sessions_go_to_the_engine_with_the_fewest():
    fleet = ready_fleet()
    for number in range(9):
        fleet.learn(str(number), fleet.for_session(None)[0])
    assert [engine.num_sessions for engine in fleet.engines] == [3, 3, 3]


def test_a_session_goes_to_its_holder_while_that_takes_work():
    fleet = ready_fleet()
    holder = fleet.engines[1]
    for number in range(5):
        fleet.learn(str(number), holder)
    assert fleet.for_session("3")[0] is holder
    holder.state = EngineState.DRAINING
    assert holder not in fleet.for_session("3")
    assert len(fleet.for_session("3")) == 2
    holder.state = EngineState.READY
    assert fleet.for_session("3")[0] is holder


def test_calls_without_session_go_where_the_fewest_are_in_flight():
    fleet = ready_fleet()
    for engine, num_in_flight in zip(fleet.engines, (2, 0, 1), strict=True):
        engine.num_in_flight = num_in_flight
    assert [engine.num_in_flight for engine in fleet.for_stateless()] == [0, 1, 2]


@pytest.mark.parametrize(
    "urls",
    [
        [],
        ["127.0.0.1:8000"],
        ["ftp://127.0.0.1"],
        ["http://"],
        ["http://user:secret@127.0.0.1:1"],
        ["http://127.0.0.1:1/v1"],
        ["http://127.0.0.1:port"],
        ["http://127.0.0.1:1", "http://127.0.0.1:1/"],
    ],
)
def test_a_wrong_address_is_one_line(urls: list[str]):
    with pytest.raises(DayshiftError) as caught:
        Fleet(urls)
    assert "\n" not in str(caught.value)


def test_a_session_that_several_engines_list_is_shown_as_its_user_sees_it():
    def info(session_id: str, *, is_busy: bool, is_parked: bool, num_turns: int) -> dict:
        return {
            "session_id": session_id,
            "is_busy": is_busy,
            "is_parked": is_parked,
            "num_turns": num_turns,
        }

    on_disk = info("a", is_busy=False, is_parked=True, num_turns=3)
    in_use = info("a", is_busy=False, is_parked=False, num_turns=4)
    other = info("0", is_busy=False, is_parked=True, num_turns=1)
    for infos in ([on_disk, other, in_use], [in_use, on_disk, other]):
        assert merged(infos) == [other, in_use]


def test_sessions_of_a_shared_store_are_counted_once():
    def gauges(num_running: int, num_sessions: int, num_parked: int) -> dict[str, float]:
        numbers = {"running": num_running, "sessions": num_sessions, "parked_sessions": num_parked}
        return {f"dayshift_engine_num_{name}": number for name, number in numbers.items()}

    # Ten sessions in the store; three are in the pool of one engine, one in that of the other.
    assert totals([gauges(2, 10, 7), gauges(1, 10, 9)]) == gauges(3, 10, 6)
    assert totals([gauges(2, 10, 7)]) == gauges(2, 10, 7)
    assert totals([]) == {}
