"""Long computations leave the event loop its turns."""

import asyncio
import time
from collections.abc import Callable

import pytest

from cleave.time_slices import SLICE_S, SliceQueue, Steps, TurnQueue, run_at_once, run_in_slices


def count(steps: int, result: list[str], name: str = "") -> Steps[int]:
    for _ in range(steps):
        until = time.monotonic() + SLICE_S / 4
        while time.monotonic() < until:
            pass
        yield
    result.append(name)
    return steps


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    pytest.fail("not within 20 s")


async def tick(turns: list[int]) -> None:
    while True:
        turns.append(1)
        await asyncio.sleep(0)


async def test_the_loop_has_turns_while_a_computation_runs() -> None:
    turns: list[int] = []
    ticking = asyncio.create_task(tick(turns))
    assert await run_in_slices(count(40, [])) == 40
    assert len(turns) >= 9
    ticking.cancel()


def test_a_computation_can_run_at_once() -> None:
    assert run_at_once(count(3, [])) == 3


async def test_what_ends_in_the_first_slice_runs_at_once_and_others_take_turns() -> None:
    queue, ended = SliceQueue(0.5, time.monotonic), []
    assert queue.start(count(0, ended, "short")) is None
    assert ended == ["short"]
    assert queue.start(count(20, ended, "long")) is not None
    assert queue.start(count(8, ended, "behind")) is not None
    await until(lambda: len(ended) == 3)
    assert ended == ["short", "behind", "long"]


async def test_computations_take_no_more_than_their_share_of_the_time() -> None:
    queue, ended = SliceQueue(0.1, time.monotonic), []
    began = time.monotonic()
    for _ in range(2):
        queue.start(count(8, ended))
    await until(lambda: len(ended) == 2)
    # The last slice is not waited for.
    assert time.monotonic() - began > 10 * (2 * 8 * SLICE_S / 4 - 2 * SLICE_S)


async def test_a_cancelled_computation_ends_and_the_next_one_goes_on() -> None:
    queue, ended = SliceQueue(0.5, time.monotonic), []
    first, second = (queue.start(count(8, ended, name)) for name in "ab")
    assert first is not None
    assert second is not None
    first.cancel()
    await until(lambda: bool(ended))
    assert ended == ["b"]
    await asyncio.sleep(0.02)
    assert ended == ["b"]


async def test_a_fault_of_one_does_not_stop_the_others() -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: faults.append(context["exception"])
    )

    def fail() -> Steps[None]:
        yield from count(8, ended)
        raise ValueError("broken")

    queue, ended = SliceQueue(0.5, time.monotonic), []
    queue.start(fail())
    queue.start(count(20, ended, "whole"))
    await until(lambda: "whole" in ended)
    assert [str(each) for each in faults] == ["broken"]


async def test_a_fault_in_the_first_slice_is_the_callers() -> None:
    def fail() -> Steps[None]:
        raise ValueError("broken")
        yield

    with pytest.raises(ValueError, match="broken"):
        SliceQueue(0.5, time.monotonic).start(fail())


class Worker:
    """Takes so many turns of 0.5 ms, one after the other."""

    def __init__(self, name: str, queue: TurnQueue, log: list[str], count: int) -> None:
        self._name, self._queue, self._log, self._left = name, queue, log, count

    def take_turn(self) -> None:
        self._log.append(self._name)
        ends_at = time.monotonic() + SLICE_S / 2
        while time.monotonic() < ends_at:
            pass
        self._left -= 1
        if self._left:
            self._queue.add(self)
            self._queue.add(self)


class Failing:
    def take_turn(self) -> None:
        raise ZeroDivisionError


async def test_hundreds_of_turns_leave_the_event_loop_to_others() -> None:
    queue, log, taken = TurnQueue(0.5, time.monotonic), [], []
    for number in range(200):
        queue.add(Worker(str(number), queue, log, 3))
    while len(log) < 600:
        before = len(log)
        await asyncio.sleep(0)
        taken.append(len(log) - before)
    assert max(taken) <= 3, "in an iteration"
    assert log == [str(number) for number in range(200)] * 3


async def test_a_turn_that_fails_keeps_no_other_from_its_own() -> None:
    queue, log, faults = TurnQueue(0.5, time.monotonic), [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    removed = Worker("removed", queue, log, 1)
    for taker in (removed, Failing(), Worker("a", queue, log, 2)):
        queue.add(taker)
    queue.remove(removed)
    await until(lambda: log == ["a", "a"])
    assert [type(each["exception"]) for each in faults] == [ZeroDivisionError]
    queue.add(Worker("later", queue, log, 1))
    await until(lambda: log == ["a", "a", "later"])
