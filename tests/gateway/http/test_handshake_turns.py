"""Handshakes of one address delay its own, and other work of the event loop by little."""

import asyncio
import time
from collections.abc import Callable

from cleave.gateway.http.handshake_turns import HandshakeTurns

NUM = 200


class Computing:
    """A handshake of half a millisecond."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.done = done

    def run_handshake(self) -> None:
        ends_at = time.monotonic() + 0.0005
        while time.monotonic() < ends_at:
            pass
        self.done.append(self.name)


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - as the event loop does it
            await asyncio.sleep(0.001)


async def test_addresses_take_turns_and_other_work_runs_in_between() -> None:
    turns, done = HandshakeTurns(0.25, time.monotonic), []
    for _ in range(NUM):
        turns.add(Computing("many", done), "a", has_begun=False)
    assert len(done) < NUM / 4, "the others wait"
    turns.add(Computing("one", done), "b", has_begun=False)
    turns.add(Computing("begun", done), "a", has_begun=True)
    await until(lambda: len(done) == NUM + 2)
    assert done.index("one") < NUM / 2
    assert done.index("begun") < NUM / 2
    turns.add(Computing("later", done), "a", has_begun=False)
    await until(lambda: done[-1] == "later")


async def test_computing_has_a_share_of_the_time() -> None:
    turns, done = HandshakeTurns(0.25, time.monotonic), []
    began = time.monotonic()
    for number in range(NUM):
        turns.add(Computing("x", done), f"10.0.0.{number}", has_begun=False)
    await until(lambda: len(done) == NUM)
    assert time.monotonic() - began > 0.75 * NUM * 0.0005 / 0.25
