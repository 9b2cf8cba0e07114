"""When a process may call another one overdue."""

import asyncio
import time

import pytest

from cleave.router.watchdog import MIN_STALL_S, WatchdogTimer, is_overdue

from tests.support.doubles import Clock


def tick(timer: WatchdogTimer, clock: Clock, after_s: float) -> None:
    clock.now_s += after_s
    timer.tick()


def test_a_tick_on_time_is_reliable(clock: Clock) -> None:
    timer = WatchdogTimer(0.2, clock)
    tick(timer, clock, 0.2 + 0.9 * MIN_STALL_S)
    assert (timer.is_reliable, timer.stall_s) == (True, 0.0)


def test_a_late_tick_is_not_reliable_and_the_one_after_it_is(clock: Clock) -> None:
    timer, seen = WatchdogTimer(0.2, clock), []
    for waited_s in (5.2, 0.2, 0.2):
        tick(timer, clock, waited_s)
        seen.append((timer.is_reliable, pytest.approx(timer.stall_s)))
    assert seen == [(False, 5.0), (True, 0.0), (True, 0.0)]


def test_a_process_that_is_always_late_judges_at_every_other_tick(clock: Clock) -> None:
    timer, seen = WatchdogTimer(0.2, clock), []
    for _ in range(4):
        tick(timer, clock, 2.0)
        seen.append(timer.is_reliable)
    assert seen == [False, True, False, True]


async def test_a_callback_that_blocks_the_loop_is_a_pause() -> None:
    timer = WatchdogTimer(0.01)
    asyncio.get_running_loop().call_soon(time.sleep, 2 * MIN_STALL_S)
    await timer.wait()
    assert timer.stall_s > MIN_STALL_S
    await timer.wait()
    assert timer.is_reliable


async def test_a_check_that_blocks_the_loop_itself_is_a_pause(clock: Clock) -> None:
    timer = WatchdogTimer(0.01, clock)
    await timer.wait()
    clock.now_s += 3.0
    await timer.wait()
    assert (timer.is_reliable, timer.stall_s) == (False, pytest.approx(3.0, abs=0.02))


def test_what_a_check_awaits_is_no_pause(clock: Clock) -> None:
    timer = WatchdogTimer(0.2, clock)
    clock.now_s += 3.0
    timer.restart()
    tick(timer, clock, 0.2)
    assert (timer.is_reliable, timer.stall_s) == (True, 0.0)


@pytest.mark.parametrize(("blocked_s", "overdue"), [(0.0, False), (2 * MIN_STALL_S, True)])
async def test_a_time_out_is_overdue_only_when_the_loop_was_held_up(
    blocked_s: float, overdue: bool
) -> None:
    limit = asyncio.timeout(0.01)

    async def wait() -> None:
        async with limit:
            asyncio.get_running_loop().call_soon(time.sleep, blocked_s)
            await asyncio.sleep(5)

    with pytest.raises(TimeoutError):
        await wait()
    assert is_overdue(limit) is overdue
