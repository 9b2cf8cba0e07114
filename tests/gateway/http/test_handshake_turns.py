"""Handshakes that lead to nothing delay others by little, and other work of the event loop."""

import asyncio
import time
from collections.abc import Callable

from cleave.gateway.http.handshake_turns import (
    HALVING_S,
    MAX_ADDRESSES,
    MAX_CREDIT,
    SETTLED_TURNS,
    HandshakeTurns,
)

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

    def fail(self) -> None:
        self.done.append("failed")


class Broken(Computing):
    def run_handshake(self) -> None:
        raise ZeroDivisionError


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - as the event loop does it
            await asyncio.sleep(0.001)


async def test_an_address_that_owes_nothing_goes_before_many_that_do() -> None:
    turns, done = HandshakeTurns(0.5, time.monotonic), []
    for number in range(NUM):
        turns.add(Computing("many", done), f"10.0.0.{number % 50}", has_begun=False)
    await until(lambda: len(done) > 60)
    before = len(done)
    turns.add(Computing("new", done), "b", has_begun=False)
    await until(lambda: "new" in done)
    assert done.index("new") - before < 20, "each of the others has had a turn"
    await until(lambda: len(done) == NUM + 1)


async def test_a_request_with_a_key_settles_its_handshake() -> None:
    turns, done = HandshakeTurns(0.5, time.monotonic), []
    for _ in range(3):
        turns.add(Computing("x", done), "paid", has_begun=False)
        turns.add(Computing("x", done), "unpaid", has_begun=False)
    await until(lambda: len(done) == 6)
    turns.settle("paid")
    assert turns._debts == {"paid": 3 - SETTLED_TURNS, "unpaid": 3}
    for _ in range(MAX_CREDIT):
        turns.settle("paid")
    assert turns._debts["paid"] == -MAX_CREDIT


async def test_of_one_address_those_that_have_begun_and_the_newest_go_first() -> None:
    turns, done = HandshakeTurns(0.25, time.monotonic), []
    for _ in range(NUM):
        turns.add(Computing("many", done), "a", has_begun=False)
    assert len(done) < NUM / 4, "the others wait"
    turns.add(Computing("begun", done), "a", has_begun=True)
    turns.add(Computing("newest", done), "a", has_begun=False)
    await until(lambda: len(done) == NUM + 2)
    assert done.index("begun") < done.index("newest") < NUM / 2
    turns.add(Computing("later", done), "a", has_begun=False)
    await until(lambda: done[-1] == "later")


async def test_computing_has_a_share_of_the_time() -> None:
    turns, done = HandshakeTurns(0.25, time.monotonic), []
    began = time.monotonic()
    for number in range(NUM):
        turns.add(Computing("x", done), f"10.0.0.{number}", has_begun=False)
    await until(lambda: len(done) == NUM)
    assert time.monotonic() - began > 0.75 * NUM * 0.0005 / 0.25


async def test_a_connection_that_has_gone_takes_no_turn_and_is_forgotten() -> None:
    turns, done = HandshakeTurns(0.25, time.monotonic), []
    waiting = [Computing(str(number), done) for number in range(NUM)]
    for number, handshake in enumerate(waiting):
        turns.add(handshake, f"10.0.0.{number % 7}", has_begun=number % 2 == 0)
    for number, handshake in enumerate(waiting):
        turns.remove(handshake, f"10.0.0.{number % 7}")
    served = len(done)
    assert not turns._waiting
    turns.add(Computing("later", done), "a", has_begun=False)
    await until(lambda: done[-1] == "later")
    assert len(done) == served + 1


async def test_a_handshake_with_a_fault_does_not_end_the_turns() -> None:
    turns, done = HandshakeTurns(0.5, time.monotonic), []
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for handshake in (Computing("first", done), Broken("", done), Computing("next", done)):
        turns.add(handshake, "a", has_begun=True)
    await until(lambda: len(done) == 3)
    assert sorted(done) == ["failed", "first", "next"]


async def test_debts_of_any_number_of_addresses_take_bounded_memory_and_leave_credit() -> None:
    now = 0.0
    turns, done = HandshakeTurns(1.0, lambda: now), []
    turns.settle("known")
    for number in range(3 * MAX_ADDRESSES):
        turns._add_debt(str(number), 1)
        assert len(turns._debts) <= MAX_ADDRESSES
    assert turns._debts["known"] == -SETTLED_TURNS
    for number in range(3 * MAX_ADDRESSES):
        turns.settle(str(number))
        assert len(turns._debts) <= MAX_ADDRESSES
    now = HALVING_S + 1
    turns._add_debt("x", 1)
    assert turns._debts[str(number)] == -SETTLED_TURNS // 2
    assert not done
