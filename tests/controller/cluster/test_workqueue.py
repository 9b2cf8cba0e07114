"""The work queue: each key once at a time, later on request, with back-off after failures."""

import asyncio

import pytest

from cleave.controller.cluster.workqueue import MAX_DELAY_S, WorkQueue

from tests.support.doubles import Clock


@pytest.fixture
def queue(clock: Clock) -> WorkQueue[str]:
    clock.now_s = 0
    return WorkQueue(clock)


async def take_one(queue: WorkQueue[str]) -> str | None:
    try:
        async with asyncio.timeout(0.01):
            return await queue.take()
    except TimeoutError:
        return None


async def test_a_key_that_is_enqueued_twice_is_handled_once(queue: WorkQueue[str]) -> None:
    queue.add("a")
    queue.add("a")
    assert await take_one(queue) == "a"
    assert await take_one(queue) is None


async def test_keys_are_handled_in_their_order(queue: WorkQueue[str]) -> None:
    for key in ("b", "a", "b", "c"):
        queue.add(key)
    assert [await take_one(queue) for _ in range(3)] == ["b", "a", "c"]


async def test_a_key_that_is_being_worked_on_waits_for_its_end(queue: WorkQueue[str]) -> None:
    queue.add("a")
    await take_one(queue)
    queue.add("a")
    assert await take_one(queue) is None
    queue.mark_done("a")
    assert await take_one(queue) == "a"
    queue.mark_done("a")
    assert await take_one(queue) is None


async def test_a_key_is_due_after_its_delay(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 5)
    assert await take_one(queue) is None
    clock.now_s = 5
    assert await take_one(queue) == "a"


async def test_the_earlier_of_two_delays_counts_and_the_later_is_forgotten(
    queue: WorkQueue[str], clock: Clock
) -> None:
    queue.add_after("a", 9)
    queue.add_after("a", 3)
    queue.add_after("a", 6)
    clock.now_s = 3
    assert await take_one(queue) == "a"
    queue.mark_done("a")
    clock.now_s = 20
    assert await take_one(queue) is None


async def test_failures_back_off_up_to_a_bound_and_success_forgets_them(
    queue: WorkQueue[str],
) -> None:
    delays = [queue.retry_with_backoff("a") for _ in range(10)]
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0]
    assert delays[-1] == MAX_DELAY_S
    queue.reset_backoff("a")
    assert queue.retry_with_backoff("a") == 0.5


async def test_what_is_forgotten_is_not_due_any_more(queue: WorkQueue[str], clock: Clock) -> None:
    queue.add_after("a", 1)
    queue.forget("a")
    clock.now_s = 2
    assert await take_one(queue) is None


async def test_a_waiting_worker_wakes_up_for_a_new_key(queue: WorkQueue[str]) -> None:
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    assert await asyncio.wait_for(waiting, 1) == "a"


async def test_two_workers_share_what_there_is(queue: WorkQueue[str]) -> None:
    workers = [asyncio.create_task(queue.take()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add("a")
    queue.add("b")
    assert set(await asyncio.wait_for(asyncio.gather(*workers), 1)) == {"a", "b"}
