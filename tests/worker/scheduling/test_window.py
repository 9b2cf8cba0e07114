"""Batches of waiting prompts that are sorted one after another."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.policy.prompt_order import PrefillOrder
from cleave_worker.scheduling.window import SortedWindow


def never(_: object) -> bool:
    return False


def drain(queue: deque[int], window: SortedWindow[int]) -> list[int]:
    order_taken = []
    while queue:
        window.sort()
        order_taken.append(queue.popleft())
        window.record_pop(order_taken[-1])
    return order_taken


@pytest.mark.parametrize(
    ("order", "order_taken"),
    [
        (PrefillOrder.FCFS, [5, 3, 4, 1, 2]),
        (PrefillOrder.SJF, [3, 4, 5, 1, 2]),
        (PrefillOrder.LJF, [5, 4, 3, 2, 1]),
    ],
)
def test_one_batch_is_sorted_at_a_time(order: PrefillOrder, order_taken: list[int]) -> None:
    queue = deque([5, 3, 4, 1, 2])
    window = SortedWindow(queue, int, never)
    window.set_order(order, 3)
    assert drain(queue, window) == order_taken


def test_who_comes_later_does_not_overtake_a_sorted_batch() -> None:
    queue = deque([5, 3])
    window = SortedWindow(queue, int, never)
    window.set_order(PrefillOrder.SJF, 16)
    window.sort()
    queue.append(1)
    assert drain(queue, window) == [3, 5, 1]


def test_who_is_put_back_stays_first_and_who_leaves_makes_no_room_in_the_batch() -> None:
    queue = deque([5, 3, 8])
    window = SortedWindow(queue, int, never)
    window.set_order(PrefillOrder.SJF, 2)
    window.sort()
    window.record_removal([3])
    queue.remove(3)
    queue.append(1)
    queue.appendleft(9)
    window.record_prepend()
    # 9 and 5 are the batch; 8 and 1 come after it.
    assert drain(queue, window) == [9, 5, 1, 8]


def test_another_order_holds_for_all_who_wait() -> None:
    queue = deque([5, 3, 4])
    window = SortedWindow(queue, int, never)
    window.set_order(PrefillOrder.SJF, 16)
    window.sort()
    window.set_order(PrefillOrder.LJF, 16)
    assert drain(queue, window) == [5, 4, 3]


@given(
    st.lists(st.integers(1, 9), max_size=40),
    st.integers(1, 12),
    st.sampled_from([PrefillOrder.SJF, PrefillOrder.LJF]),
)
def test_no_request_is_overtaken_by_more_than_a_batch(
    lengths: list[int], batch: int, order: PrefillOrder
) -> None:
    prompts = [(length, number) for number, length in enumerate(lengths)]
    queue = deque(prompts)
    window = SortedWindow(queue, lambda prompt: prompt[0], never)
    window.set_order(order, batch)
    order_taken = drain(queue, window)
    assert sorted(order_taken) == sorted(prompts)
    for place, (_, number) in enumerate(order_taken):
        assert place // batch == number // batch


def test_late_requests_wait_behind_all_others_in_their_order() -> None:
    late, queue = {1, 3, 4}, deque([1, 2, 3, 4])
    window = SortedWindow(queue, int, late.__contains__)
    window.set_order(PrefillOrder.IN_TIME, 16)
    window.sort()
    window.add(5)
    assert queue == deque([2, 3, 4, 5, 1])
    assert drain(queue, window) == [2, 5, 1, 3, 4]


def test_late_requests_are_served_while_no_other_waits_and_may_leave() -> None:
    queue = deque([1, 2, 3])
    window = SortedWindow(queue, int, lambda request: request < 9)
    window.set_order(PrefillOrder.IN_TIME, 16)
    window.sort()
    window.record_removal([2])
    queue.remove(2)
    window.add(9)
    assert queue == deque([9, 1, 3])
    assert drain(queue, window) == [9, 1, 3]
    window.add(4)
    assert queue == deque([4])


def test_with_another_order_no_request_is_late_any_more() -> None:
    queue = deque([1, 2])
    window = SortedWindow(queue, int, lambda request: request == 1)
    window.set_order(PrefillOrder.IN_TIME, 16)
    window.sort()
    window.set_order(PrefillOrder.FCFS, 16)
    window.add(3)
    assert drain(queue, window) == [2, 1, 3]
