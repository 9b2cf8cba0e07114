"""When a draining engine counts as empty."""

from collections.abc import Callable, Iterator

import pytest

from cleave.shm.load_page import LoadSnapshot
from cleave_worker.agent.drain import DrainResult, drain, is_idle


def reader(*loads: LoadSnapshot) -> Callable[[], LoadSnapshot]:
    """Loads one after the other, the last one for ever."""

    def each() -> Iterator[LoadSnapshot]:
        yield from loads
        while True:
            yield loads[-1]

    source = each()
    return lambda: next(source)


BUSY = LoadSnapshot(num_running=2, num_waiting=1, kv_cache_usage=0.2)
HOLDS_KV = LoadSnapshot(kv_cache_usage=0.1)
IDLE = LoadSnapshot()


@pytest.mark.parametrize("load", [BUSY, HOLDS_KV, LoadSnapshot(num_waiting=1)])
def test_work_and_unpulled_kv_keep_an_engine_alive(load: LoadSnapshot) -> None:
    assert not is_idle(load)


async def test_a_drain_ends_when_the_engine_is_empty() -> None:
    read = reader(BUSY, HOLDS_KV, IDLE)
    assert await drain(read, seconds=30, quiet=0.02, poll=0.001) == DrainResult(True, 0)


async def test_work_that_arrives_in_the_quiet_period_ends_it() -> None:
    read = reader(IDLE, BUSY)
    assert await drain(read, seconds=0.2, quiet=0.05, poll=0.001) == DrainResult(False, 3)


async def test_a_drain_that_takes_too_long_reports_what_is_left() -> None:
    assert await drain(reader(BUSY), 0.02, quiet=0.01, poll=0.001) == DrainResult(False, 3)


async def test_a_handoff_that_is_never_pulled_does_not_hold_a_drain_for_ever() -> None:
    assert await drain(reader(HOLDS_KV), 0.02, quiet=0.01, poll=0.001) == DrainResult(False, 0)
