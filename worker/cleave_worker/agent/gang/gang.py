"""The common life of an instance's data-parallel ranks: when their engines start and end. Pure.

Used by `agent.cell`, which hears the agents of all ranks over `gang_link`. vLLM's ranks compute in
step, through collective operations. When one engine ends, the others fail or wait in their next
step, and a single engine cannot join them again. So no engine starts before those of all ranks have
ended, all stop when one is lost, and one whose requests have finished stays until those of the
others have. As nodes may have different files, no engine starts unless all would load the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from cleave.rpc.v1 import gang_pb2


class Report(IntEnum):
    """What the agent of a rank reports; gang.proto says what each means."""

    READY = gang_pb2.RANK_EVENT_READY
    LOST = gang_pb2.RANK_EVENT_LOST
    DRAINS = gang_pb2.RANK_EVENT_DRAINS
    DRAINED = gang_pb2.RANK_EVENT_DRAINED


class Order(IntEnum):
    """What the agents of all ranks have to do; gang.proto says what each means."""

    START = gang_pb2.RANK_COMMAND_START
    STOP = gang_pb2.RANK_COMMAND_STOP
    DRAIN = gang_pb2.RANK_COMMAND_DRAIN
    END = gang_pb2.RANK_COMMAND_END
    REFUSE = gang_pb2.RANK_COMMAND_REFUSE


@dataclass(frozen=True, slots=True)
class GangOrder:
    """An order to all ranks."""

    kind: Order
    start: int
    """Number of the common start that it is about, from 1; 0: there has been none."""
    reason: str = ""
    """Why a start is refused, one sentence."""


class Gang:
    """The ranks of one instance."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._start = 0
        self._is_running = False
        self._ready: dict[int, str] = {}
        """What the engine of each rank that is ready would load."""
        self._is_draining = False
        self._drained: set[int] = set()

    def join(self) -> GangOrder | None:
        """Return the order to a rank that has just joined; None: there is none."""
        return GangOrder(Order.DRAIN, self._start) if self._is_draining else None

    def apply(self, rank: int, report: Report, start: int, weights: str = "") -> GangOrder | None:
        """Apply the report of a rank about the common start `start`; return the order that follows,
        None: none does. `weights`: what the engine of a rank that is ready would load."""
        match report:
            case Report.READY:
                return self._add_ready(rank, weights)
            case Report.LOST:
                return self._stop(start)
            case Report.DRAINS:
                return self._drain()
            case Report.DRAINED:
                return self._add_drained(rank)

    def remove(self, rank: int) -> GangOrder | None:
        """Apply that a rank's agent has ended, or cannot be reached any more; return the order that
        follows, None: none does. The rank may join again."""
        self._ready.pop(rank, None)
        if self._is_draining:
            if len(self._drained) == self.size:
                return None
            # Nothing is left of it that others could wait for.
            if order := self._add_drained(rank):
                return order
        return self._stop(self._start)

    def _add_ready(self, rank: int, weights: str) -> GangOrder | None:
        self._ready[rank] = weights
        if len(self._ready) < self.size:
            return None
        ready, self._ready = self._ready, {}
        if len(set(ready.values())) > 1:
            return GangOrder(Order.REFUSE, self._start, _describe_difference(ready))
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
        return GangOrder(Order.END, self._start) if len(self._drained) == self.size else None


def _describe_difference(weights: Mapping[int, str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, each in sorted(weights.items()):
        ranks.setdefault(each or "none", []).append(str(rank))
    found = ", ".join(f"{each} at rank {' and '.join(of)}" for each, of in ranks.items())
    return (
        f"the data-parallel ranks find different weights: {found}; "
        "give the nodes of all ranks the same files"
    )
