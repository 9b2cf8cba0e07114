"""Collections look at what is young only; what lives long is looked at when memory has grown."""

import asyncio
import gc
import sys
from collections.abc import Iterator

import pytest

from cleave.gateway import garbage_collection
from cleave.gateway.garbage_collection import GROWTH, collect_in_steps

pytestmark = pytest.mark.interpreted


class Cycle:
    """Garbage that reference counts do not free."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


@pytest.fixture(autouse=True)
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(garbage_collection, "FREEZE_INTERVAL_S", 0.01)
    monkeypatch.setattr(garbage_collection, "YOUNG_INTERVAL_S", 0.01)
    monkeypatch.setattr(garbage_collection, "COUNT_INTERVAL_S", 0.05)
    before = gc.get_threshold()
    gc.collect()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
    gc.collect()
    assert not Cycle.alive


async def run(build) -> object:
    """What is built while garbage is collected, once it has lived for a while."""
    collecting = asyncio.create_task(collect_in_steps())
    await asyncio.sleep(0)
    built = build()
    for _ in range(100):
        await asyncio.sleep(0.02)
        if not len(gc.get_objects()) > 1_000:
            break
    collecting.cancel()
    return built


def test_what_lives_long_is_in_no_collection() -> None:
    lists = asyncio.run(run(lambda: [[number] for number in range(20_000)]))
    assert len(gc.get_objects()) < 1_000 < len(lists)


def test_many_young_objects_are_in_no_collection_while_as_many_old_ones_end(monkeypatch) -> None:
    """Python's own count, of those made less those freed, stays as it is."""
    monkeypatch.setattr(garbage_collection, "FREEZE_INTERVAL_S", 60.0)
    looked_at = []

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations = range(info["generation"] + 1)
            looked_at.append(sum(len(gc.get_objects(number)) for number in generations))

    async def replace() -> list[list[int]]:
        old, new = [[number] for number in range(50_000)], []
        collecting = asyncio.create_task(collect_in_steps())
        await asyncio.sleep(0)
        gc.callbacks.append(look)
        while old:
            for _ in range(2_500):
                new.append([old.pop()[0]])
            await asyncio.sleep(0.02)
        new += [[number] for number in range(2_000)]
        collecting.cancel()
        return new

    try:
        asyncio.run(replace())
    finally:
        gc.callbacks.remove(look)
    assert looked_at
    assert max(looked_at) < 20_000


def test_young_garbage_is_collected_at_once() -> None:
    def build() -> int:
        for _ in range(5_000):
            Cycle()
        return Cycle.alive

    assert asyncio.run(run(build)) <= 1_000


def test_frozen_garbage_is_collected_once_memory_has_grown() -> None:
    async def grow() -> None:
        collecting = asyncio.create_task(collect_in_steps())
        await asyncio.sleep(0)
        Cycle().me.other = kept = []
        gc.freeze()
        assert Cycle.alive
        kept += [[number] for number in range(GROWTH * sys.getallocatedblocks() // 2)]
        for _ in range(200):
            await asyncio.sleep(0.05)
            if not Cycle.alive:
                break
        collecting.cancel()

    asyncio.run(grow())
    assert not Cycle.alive
