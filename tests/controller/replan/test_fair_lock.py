"""Whose turn it is."""

import asyncio

from cleave.controller.replan.fair_lock import FairLock


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def take(lock: FairLock, group: str, order: list[str], name: str) -> None:
    async with lock.acquire(group):
        order.append(name)
        await asyncio.sleep(0)


async def test_a_group_with_many_waiters_does_not_hold_up_another() -> None:
    lock, order = FairLock(), []
    async with lock.acquire("a"):
        names = ("a1", "a2", "a3", "b1", "c1", "b2")
        tasks = [asyncio.create_task(take(lock, name[0], order, name)) for name in names]
        await settle()
        assert lock.has_other_waiters("a")
    await asyncio.gather(*tasks)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert not lock.has_other_waiters("a")


async def test_a_waiter_that_gives_up_passes_its_turn_on() -> None:
    lock, order = FairLock(), []
    async with lock.acquire("a"):
        waiting, late, last = (
            asyncio.create_task(take(lock, name, order, name)) for name in ("b", "c", "d")
        )
        await settle()
        waiting.cancel()
    # The lock has just been passed to `late`, which has not run yet.
    late.cancel()
    await asyncio.gather(waiting, late, last, return_exceptions=True)
    assert order == ["d"]
    async with asyncio.timeout(1), lock.acquire("e"):
        pass
