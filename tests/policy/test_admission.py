"""Who may join a batch so that its KV does not run out."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.admission import Admission, find_peak, is_protected, may_join

batches = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 30)), min_size=1, max_size=12)


def test_greedy_looks_at_what_is_held_now() -> None:
    assert may_join(
        Admission.GREEDY,
        free=100,
        used_tokens=100,
        remaining_tokens=500,
        batch=9,
        shortest_remaining_tokens=1,
    )
    assert not may_join(
        Admission.GREEDY,
        free=99,
        used_tokens=100,
        remaining_tokens=0,
        batch=0,
        shortest_remaining_tokens=0,
    )


def test_reserve_static_wants_room_for_all_that_will_be_held() -> None:
    assert may_join(
        Admission.RESERVE_STATIC,
        100,
        used_tokens=60,
        remaining_tokens=40,
        batch=9,
        shortest_remaining_tokens=1,
    )
    assert not may_join(
        Admission.RESERVE_STATIC,
        99,
        used_tokens=60,
        remaining_tokens=40,
        batch=9,
        shortest_remaining_tokens=1,
    )


def test_reserve_dynamic_wants_room_until_the_first_of_all_ends() -> None:
    # Ten requests grow for five steps: 60 + 50.
    assert may_join(
        Admission.RESERVE_DYNAMIC,
        110,
        used_tokens=60,
        remaining_tokens=400,
        batch=9,
        shortest_remaining_tokens=5,
    )
    assert not may_join(
        Admission.RESERVE_DYNAMIC,
        109,
        used_tokens=60,
        remaining_tokens=400,
        batch=9,
        shortest_remaining_tokens=5,
    )
    # The new one itself may be the first to end.
    assert may_join(
        Admission.RESERVE_DYNAMIC,
        80,
        used_tokens=60,
        remaining_tokens=2,
        batch=9,
        shortest_remaining_tokens=5,
    )


def test_alone_a_request_joins_when_all_of_it_fits() -> None:
    for admission in (Admission.RESERVE_STATIC, Admission.RESERVE_DYNAMIC):
        assert may_join(
            admission,
            100,
            used_tokens=60,
            remaining_tokens=40,
            batch=0,
            shortest_remaining_tokens=0,
        )
        assert not may_join(
            admission, 99, used_tokens=60, remaining_tokens=40, batch=0, shortest_remaining_tokens=0
        )


@given(batches)
def test_the_peak_is_the_most_that_any_step_holds(batch: list[tuple[int, int]]) -> None:
    resident, left = np.array([h for h, _ in batch]), np.array([n for _, n in batch])
    steps = range(max(n for _, n in batch) + 1)
    by_step = [sum(h + step for h, n in batch if step <= n) for step in steps]
    assert find_peak(resident, left) == max(by_step)


def test_requests_preempted_up_to_the_limit_are_spared_and_none_without_a_limit() -> None:
    assert [is_protected(times, 2) for times in range(4)] == [False, False, True, True]
    assert not any(is_protected(times, 0) for times in range(4))
