"""Lets the ranks of one consumer engine share a lease, and ends it when the last rank is done.

Stands between a server's connections and `Holds`, which sees all ranks as one consumer. What is
hard: ranks arrive in any order, and some only to say that they need nothing. The blocks are free
once all ranks have released them, or when one rank was lost: then no rank uses what it has read.
`Holds` itself tracks layerwise consumers; only their releases pass through here.
"""

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

from cleave_worker.transfer.block_leases import Holds, Visitor
from cleave_worker.transfer.handoff import Reason, RefusedError

_REMEMBERED = 4096
"""Pulls that are tracked; some ranks of a pull may never connect."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for blocks of a leased prompt."""

    request_id: str
    epoch: int
    prompt_digest: str
    first_block: int
    num_blocks: int

    @property
    def wanted(self) -> slice:
        """The requested blocks as a slice of the prompt's blocks."""
        return slice(self.first_block, self.first_block + self.num_blocks)


@dataclass(slots=True)
class _Turn:
    boot_id: str
    ask: Ask | None = None
    blocks: tuple[int, ...] = ()
    came: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Turns:
    """Ranks that share pulls from one server."""

    def __init__(self, leases: Holds) -> None:
        self._holds = leases
        self._turns: OrderedDict[tuple[str, int], _Turn] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, consumer: Visitor, request: Ask, wait_s: float) -> tuple[int, ...]:
        """Lease blocks to a consumer rank, which must release them. Raises RefusedError."""
        if consumer.num_ranks == 1:
            return self._take(request, wait_s)
        state = self._turn(consumer, request.request_id, request.epoch)
        with state.lock:
            if state.boot_id != consumer.boot_id or consumer.rank in state.came:
                raise RefusedError(Reason.BUSY, "another consumer reads it, or has read it")
            if state.ask is None:
                state.blocks = self._take(request, wait_s)
                state.ask = request
            elif state.ask != request:
                raise RefusedError(
                    Reason.MALFORMED, "another rank of this consumer requested other blocks"
                )
            state.came.add(consumer.rank)
            return state.blocks

    def release(self, consumer: Visitor, request_id: str, epoch: int) -> bool:
        """Record that a rank is done; return whether the blocks were leased until now."""
        if consumer.num_ranks == 1:
            return self._holds.release(request_id, epoch)
        state = self._turn(consumer, request_id, epoch)
        with state.lock:
            if state.boot_id != consumer.boot_id:
                return False
            state.came.add(consumer.rank)
            state.done.add(consumer.rank)
            if len(state.done) < consumer.num_ranks:
                return self._holds.has(request_id, epoch)
            return self._end(request_id, epoch)

    def abandon(self, request_id: str, epoch: int) -> None:
        """Free the blocks of a pull after the connection with one of its ranks broke."""
        self._end(request_id, epoch)

    def _take(self, request: Ask, wait_s: float) -> tuple[int, ...]:
        return self._holds.take(
            request.request_id, request.epoch, request.prompt_digest, request.wanted, wait_s
        )

    def _turn(self, consumer: Visitor, request_id: str, epoch: int) -> _Turn:
        with self._lock:
            state = self._turns.setdefault((request_id, epoch), _Turn(consumer.boot_id))
            while len(self._turns) > _REMEMBERED:
                self._turns.popitem(last=False)
            return state

    def _end(self, request_id: str, epoch: int) -> bool:
        with self._lock:
            self._turns.pop((request_id, epoch), None)
        return self._holds.release(request_id, epoch)
