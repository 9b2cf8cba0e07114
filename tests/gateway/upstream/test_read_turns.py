"""Many large reads share one slice of the event loop, piece by piece."""

import asyncio
import time

import pytest

from cleave.gateway.upstream.read_turns import ReadTurns


class SlowReader:
    """Parses so many pieces, each of which takes 0.5 ms."""

    def __init__(self, name: str, log: list[str], count: int) -> None:
        self._name, self._log, self._left = name, log, count

    def parse_next(self) -> bool:
        self._log.append(self._name)
        ends_at = time.monotonic() + 0.0005
        while time.monotonic() < ends_at:
            pass
        self._left -= 1
        return self._left > 0


async def test_hundreds_of_readers_leave_the_event_loop_to_others() -> None:
    turns, log, pieces = ReadTurns(), [], []
    for number in range(200):
        turns.add(SlowReader(str(number), log, 3))
    while len(log) < 600:
        before = len(log)
        await asyncio.sleep(0)
        pieces.append(len(log) - before)
    assert max(pieces) <= 3, "in an iteration"
    assert log == [str(number) for number in range(200)] * 3


async def test_a_reader_that_fails_keeps_no_other_from_its_turn() -> None:
    class Failing:
        def parse_next(self) -> bool:
            raise ZeroDivisionError

    turns, log, faults = ReadTurns(), [], []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    turns.add(Failing())
    turns.add(SlowReader("a", log, 2))
    for _ in range(20):
        await asyncio.sleep(0)
    assert log == ["a", "a"]
    assert [type(each["exception"]) for each in faults] == [ZeroDivisionError]


@pytest.mark.parametrize("again", [1, 5])
async def test_a_reader_may_come_again(again: int) -> None:
    turns, log = ReadTurns(), []
    for _ in range(again):
        turns.add(SlowReader("a", log, 1))
        for _ in range(3):
            await asyncio.sleep(0)
    assert log == ["a"] * again
