"""Long computations in slices of about 1 ms, between which the event loop does everything else.

A computation is a generator that yields wherever it may be interrupted, at least every 0.2 ms; its
return value is the result. So the computation itself stays a pure function. Used by gateways for
large requests and pages, and by the router for what grows with the fleet.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from time import monotonic
from typing import Protocol, TypeAlias, TypeVar

T = TypeVar("T")

Steps: TypeAlias = Generator[None, None, T]
"""A computation of a T."""

SLICE_S = 0.001


def run_at_once(steps: Steps[T]) -> T:
    """The result, computed without interruption."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


async def run_in_slices(steps: Steps[T]) -> T:
    """The result, computed a slice at a time."""
    while True:
        slice_ends_at = monotonic() + SLICE_S
        try:
            while monotonic() < slice_ends_at:
                next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


class SliceQueue:
    """Computations that take turns: one slice at a time, of one after the other."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        """`share`: of the event loop's time, for all of them together; `clock`: seconds."""
        self._share = share
        self._clock = clock
        self._waiting: deque[SlicedTask] = deque()
        self._is_scheduled = False
        self.next_at = 0.0
        """When the next slice may run."""

    def start(self, steps: Steps[None]) -> "SlicedTask | None":
        """Run a computation, its first slice at once if nothing waits; None: it has ended."""
        task = SlicedTask(steps)
        if not self._waiting and self._clock() >= self.next_at and self._run(task):
            return None
        self._waiting.append(task)
        self._schedule()
        return task

    def _run(self, task: "SlicedTask") -> bool:
        """Run a slice; whether it was the last one."""
        began_at = self._clock()
        try:
            return task.run_slice(began_at + SLICE_S, self._clock)
        finally:
            self.next_at = began_at + (self._clock() - began_at) / self._share

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            delay_s = max(self.next_at - self._clock(), 0.0)
            asyncio.get_running_loop().call_later(delay_s, self._run_next)

    def _run_next(self) -> None:
        self._is_scheduled = False
        while self._waiting:
            task = self._waiting.popleft()
            if task.is_cancelled:
                continue
            try:
                if not self._run(task):
                    self._waiting.append(task)
            finally:
                if self._waiting:
                    self._schedule()
            return


class TurnTaker(Protocol):
    """What waits for a turn."""

    def take_turn(self) -> None:
        """Do a part of the work, of a millisecond at most; nothing if there is none."""


class TurnQueue:
    """Turns in a share of the event loop's time: first come, first served."""

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        """As SliceQueue's."""
        self._slices = SliceQueue(share, clock)
        self._waiting: dict[TurnTaker, None] = {}
        self._is_running = False

    def add(self, taker: TurnTaker) -> None:
        """It has one turn, soon; nothing if it waits already."""
        self._waiting[taker] = None
        self._start()

    def remove(self, taker: TurnTaker) -> None:
        """It takes no turn; it may wait or not."""
        self._waiting.pop(taker, None)

    def _start(self) -> None:
        if self._waiting and not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(lambda: self._slices.start(self._take_turns()))

    def _take_turns(self) -> Steps[None]:
        try:
            while self._waiting:
                taker = next(iter(self._waiting))
                del self._waiting[taker]
                taker.take_turn()
                yield
        except Exception:
            self._is_running = False
            self._start()
            raise
        self._is_running = False


class SlicedTask:
    """A computation that has not ended."""

    def __init__(self, steps: Steps[None]) -> None:
        self._steps = steps
        self.is_cancelled = False

    def run_slice(self, end_at: float, clock: Callable[[], float]) -> bool:
        """Run until this time; whether the computation has ended."""
        steps = self._steps
        try:
            while clock() < end_at:
                next(steps)
        except StopIteration:
            return True
        return False

    def cancel(self) -> None:
        """End it early."""
        self.is_cancelled = True
        self._steps.close()

    def set_paused(self, blocked: bool) -> None:
        """Nothing to do: its result may be sent to a client that reads slowly."""
