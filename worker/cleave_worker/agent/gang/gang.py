"""The common life of an instance's data-parallel ranks: when their engines start and end. Pure.

Used by `agent.cell`, which starts the agents of all ranks and hears their reports over
`gang_link`. vLLM's ranks compute in step, through collective operations. When one engine
ends, the others fail or wait in their next step, and a single engine cannot join them again. So no
engine starts before those of all ranks have ended, all stop when one is lost, and one whose
requests have finished stays until those of the others have.
"""

from dataclasses import dataclass
from enum import StrEnum


class Report(StrEnum):
    """What the agent of a rank reports."""

    READY = "ready"
    """Its engine may start; none of it runs."""
    LOST = "lost"
    """Its engine has ended, or has to."""
    DRAINS = "drains"
    """It takes no new requests any more."""
    DRAINED = "drained"
    """Its last requests have finished, or its time for that is over."""


class Order(StrEnum):
    """What the agents of all ranks have to do."""

    START = "start"
    """Start the engine."""
    STOP = "stop"
    """Stop the engine of this start; the next one comes with a new START."""
    DRAIN = "drain"
    """Take no new requests any more."""
    END = "end"
    """End: all ranks are drained."""


@dataclass(frozen=True, slots=True)
class GangOrder:
    """An order to all ranks."""

    kind: Order
    start: int
    """Number of the common start that it is about, from 1; 0: there has been none."""


class Gang:
    """The ranks of one instance."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._start = 0
        self._is_running = False
        self._ready: set[int] = set()
        self._is_draining = False
        self._drained: set[int] = set()

    def apply(self, rank: int, report: Report, start: int) -> GangOrder | None:
        """Apply the report of a rank about the common start `start`; return the order that follows,
        None: none does."""
        match report:
            case Report.READY:
                return self._add_ready(rank)
            case Report.LOST:
                return self._stop(start)
            case Report.DRAINS:
                return self._drain()
            case Report.DRAINED:
                return self._add_drained(rank)

    def _add_ready(self, rank: int) -> GangOrder | None:
        self._ready.add(rank)
        if len(self._ready) < self._size:
            return None
        self._ready.clear()
        self._start += 1
        self._is_running = True
        return GangOrder(Order.START, self._start)

    def _stop(self, start: int) -> GangOrder | None:
        if not self._is_running or start != self._start:
            return None
        self._is_running = False
        return GangOrder(Order.STOP, self._start)

    def _drain(self) -> GangOrder | None:
        if self._is_draining:
            return None
        self._is_draining = True
        return GangOrder(Order.DRAIN, self._start)

    def _add_drained(self, rank: int) -> GangOrder | None:
        self._drained.add(rank)
        return GangOrder(Order.END, self._start) if len(self._drained) == self._size else None
