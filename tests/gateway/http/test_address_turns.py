"""Connections that lead to nothing delay others by little, and other work of the event loop."""

import asyncio
import time
from collections.abc import Callable

from cleave.gateway.http.address_debts import SETTLED, AddressDebts
from cleave.gateway.http.address_turns import AddressTurns

NUM = 200


class Computing:
    """A turn of half a millisecond."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name = name
        self.done = done

    def take_turn(self) -> None:
        ends_at = time.monotonic() + 0.0005
        while time.monotonic() < ends_at:
            pass
        self.done.append(self.name)

    def fail(self) -> None:
        self.done.append("failed")


class Broken(Computing):
    def take_turn(self) -> None:
        raise ZeroDivisionError


def make_turns(share: float) -> AddressTurns:
    return AddressTurns(share, time.monotonic, AddressDebts(time.monotonic))


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_true():  # noqa: ASYNC110 - as the event loop does it
            await asyncio.sleep(0.001)


async def test_an_address_that_owes_nothing_goes_before_many_that_do() -> None:
    turns, done = make_turns(0.5), []
    for number in range(NUM):
        turns.add(Computing("many", done), f"10.0.0.{number % 50}", goes_first=False)
    await until(lambda: len(done) > 60)
    before = len(done)
    turns.add(Computing("new", done), "b", goes_first=False)
    await until(lambda: "new" in done)
    assert done.index("new") - before < 20, "each of the others has had a turn"
    await until(lambda: len(done) == NUM + 1)


async def test_who_has_credit_goes_first_and_each_turn_is_a_debt() -> None:
    debts = AddressDebts(time.monotonic)
    turns, done = AddressTurns(0.5, time.monotonic, debts), []
    debts.add("known", -SETTLED)
    for _ in range(50):
        for address in ("a", "b", "known"):
            turns.add(Computing(address, done), address, goes_first=False)
    await until(lambda: len(done) == 150)
    begin = done[1 : SETTLED + 1]
    assert begin == ["known"] * SETTLED, "the first one ran at once"
    assert [debts.get(each) for each in ("a", "b", "known")] == [50, 50, 50 - SETTLED]
    assert not len(turns._ranked)


async def test_of_one_address_those_that_go_first_and_the_newest_are_served() -> None:
    turns, done = make_turns(0.25), []
    for _ in range(NUM):
        turns.add(Computing("many", done), "a", goes_first=False)
    assert len(done) < NUM / 4, "the others wait"
    turns.add(Computing("first of all", done), "a", goes_first=True)
    turns.add(Computing("newest", done), "a", goes_first=False)
    await until(lambda: len(done) == NUM + 2)
    assert done.index("first of all") < done.index("newest") < NUM / 2
    turns.add(Computing("later", done), "a", goes_first=False)
    await until(lambda: done[-1] == "later")


async def test_computing_has_a_share_of_the_time() -> None:
    turns, done = make_turns(0.25), []
    began = time.monotonic()
    for number in range(NUM):
        turns.add(Computing("x", done), f"10.0.0.{number}", goes_first=False)
    await until(lambda: len(done) == NUM)
    assert time.monotonic() - began > 0.75 * NUM * 0.0005 / 0.25


async def test_a_connection_that_has_gone_takes_no_turn_and_is_forgotten() -> None:
    turns, done = make_turns(0.25), []
    waiting = [Computing(str(number), done) for number in range(NUM)]
    for number, handshake in enumerate(waiting):
        turns.add(handshake, f"10.0.0.{number % 7}", goes_first=number % 2 == 0)
    for number, handshake in enumerate(waiting):
        turns.remove(handshake, f"10.0.0.{number % 7}")
    served = len(done)
    assert not turns._waiting
    turns.add(Computing("later", done), "a", goes_first=False)
    await until(lambda: done[-1] == "later")
    assert len(done) == served + 1


async def test_a_connection_with_a_fault_does_not_end_the_turns() -> None:
    turns, done = make_turns(0.5), []
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    for handshake in (Computing("first", done), Broken("", done), Computing("next", done)):
        turns.add(handshake, "a", goes_first=True)
    await until(lambda: len(done) == 3)
    assert sorted(done) == ["failed", "first", "next"]
