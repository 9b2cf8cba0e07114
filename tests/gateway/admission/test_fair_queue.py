"""Whose turn it is."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.admission.fair_queue import FairQueue

NEVER = 1e9


def serve(queue: FairQueue[str], count: int) -> list[str | None]:
    return [queue.pop() for _ in range(count)]


def test_one_tenant_is_served_in_order() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.push(name, "t", 10, deadline=NEVER)
    assert serve(queue, 4) == ["a", "b", "c", None]


def test_a_flood_does_not_delay_a_tenant_with_few_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push(f"flood{number}", "loud", 10, deadline=NEVER)
    queue.push("quiet", "quiet", 10, deadline=NEVER)
    assert "quiet" in serve(queue, 2)


def test_tenants_get_tokens_by_their_weights_however_long_their_requests_are() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(1_000):
        queue.push("long", "long", 400, weight=1, deadline=NEVER)
        queue.push("short", "short", 100, weight=3, deadline=NEVER)
    served = Counter(serve(queue, 650))
    assert served["long"] * 400 * 3 == served["short"] * 100


def test_a_higher_priority_goes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("low", "a", 1, priority=-1, deadline=NEVER)
    queue.push("middle", "b", 1, deadline=NEVER)
    queue.push("high", "c", 1_000, priority=5, deadline=NEVER)
    assert serve(queue, 3) == ["high", "middle", "low"]


def test_idle_time_saves_nothing_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(50):
        queue.push("busy", "busy", 10, deadline=NEVER)
    serve(queue, 40)
    for _ in range(10):
        queue.push("late", "late", 10, deadline=NEVER)
    assert Counter(serve(queue, 10))["late"] in (5, 6)


def test_who_has_left_is_skipped_and_counted_no_more() -> None:
    queue: FairQueue[str] = FairQueue()
    first = queue.push("first", "t", 10, deadline=NEVER)
    queue.push("second", "t", 20, deadline=NEVER)
    queue.remove(first)
    queue.remove(first)
    assert (len(queue), queue.count("t"), queue.total_cost) == (1, 1, 20)
    assert serve(queue, 2) == ["second", None]


def test_who_has_waited_too_long_is_found() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("late", "t", 1, deadline=5.0)
    queue.push("patient", "t", 1, deadline=NEVER)
    assert queue.list_expired(5.0) == []
    assert queue.list_expired(5.1) == ["late"]


moves = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.integers(0, 1), st.booleans())
)


@given(moves)
def test_every_request_is_served_once_and_the_queue_is_empty(pushes) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting = set()
    for number, (tenant, cost, priority, then_pop) in enumerate(pushes):
        queue.push(number, tenant, cost, priority=priority, deadline=NEVER)
        waiting.add(number)
        if then_pop:
            served = queue.pop()
            assert served in waiting
            waiting.discard(served)
        assert len(queue) == len(waiting)
    while (served := queue.pop()) is not None:
        waiting.discard(served)
    assert (waiting, len(queue), queue.total_cost) == (set(), 0, 0)
