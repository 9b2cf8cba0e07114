"""Lets the ranks of one consumer engine share a lease, and ends it when the last rank is done.

Sits between a server's connections and `BlockLeases`, which treats all ranks as one consumer. Ranks
arrive in any order, and some only report that they need nothing. The blocks are free once all ranks
have released them, or when one rank was lost: then no rank uses what it has read. `BlockLeases`
itself tracks layerwise consumers; only their releases go through here.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from cleave_worker.transfer.block_leases import BlockLeases, BlockRequest, ConsumerRank
from cleave_worker.transfer.handoff import RefusalReason, RefusedError

_MAX_TRACKED_PULLS = 4096
"""Pulls that are tracked; some ranks of a pull may never connect."""


@dataclass(slots=True)
class _BarrierState:
    boot_id: str
    request: BlockRequest | None = None
    blocks: tuple[int, ...] = ()
    arrived: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class RankBarrier:
    """Ranks that share pulls from one server."""

    def __init__(self, leases: BlockLeases) -> None:
        self._leases = leases
        self._states: OrderedDict[tuple[str, int], _BarrierState] = OrderedDict()
        self._lock = threading.Lock()

    def acquire(self, consumer: ConsumerRank, pull: BlockRequest, wait_s: float) -> tuple[int, ...]:
        """Lease blocks to a consumer rank, which must release them. Raises RefusedError."""
        if consumer.num_ranks == 1:
            return self._leases.acquire(pull, wait_s)
        state = self._get_state(consumer, pull.request_id, pull.epoch)
        with state.lock:
            if state.boot_id != consumer.boot_id or consumer.rank in state.arrived:
                raise RefusedError(RefusalReason.BUSY, "another consumer reads it, or has read it")
            if state.request is None:
                state.blocks = self._leases.acquire(pull, wait_s)
                state.request = pull
            elif state.request != pull:
                fault = "another rank of this consumer requested other blocks"
                raise RefusedError(RefusalReason.MALFORMED, fault)
            state.arrived.add(consumer.rank)
            return state.blocks

    def release(self, consumer: ConsumerRank, request_id: str, epoch: int) -> bool:
        """Record that a rank is done; return whether the blocks were leased until now."""
        if consumer.num_ranks == 1:
            return self._leases.release(request_id, epoch)
        state = self._get_state(consumer, request_id, epoch)
        with state.lock:
            if state.boot_id != consumer.boot_id:
                return False
            state.arrived.add(consumer.rank)
            state.finished.add(consumer.rank)
            if len(state.finished) < consumer.num_ranks:
                return self._leases.is_complete(request_id, epoch)
            return self.abandon(request_id, epoch)

    def abandon(self, request_id: str, epoch: int) -> bool:
        """Free the blocks of a pull that has ended, or lost the connection with one of its ranks.
        Returns whether they were leased until now."""
        with self._lock:
            self._states.pop((request_id, epoch), None)
        return self._leases.release(request_id, epoch)

    def _get_state(self, consumer: ConsumerRank, request_id: str, epoch: int) -> _BarrierState:
        with self._lock:
            state = self._states.setdefault((request_id, epoch), _BarrierState(consumer.boot_id))
            while len(self._states) > _MAX_TRACKED_PULLS:
                self._states.popitem(last=False)
            return state
