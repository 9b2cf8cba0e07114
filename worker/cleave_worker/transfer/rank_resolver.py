"""The producer ranks that one consumer rank contacts for a handoff.

For an overlapped prefill the gateway knows only the address of the producer's rank 0, which knows
the other ranks and the parallelism. It is queried once per boot.
"""

import threading
from collections import OrderedDict
from contextlib import closing
from dataclasses import dataclass, field

import msgspec

from cleave_worker.transfer import protocol
from cleave_worker.transfer.authentication import connect_authenticated
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError
from cleave_worker.transfer.server import RegisteredKv
from cleave_worker.transfer.sharding import ParallelShape, ShardSource, find_sources

_MAX_BOOTS = 256
_BootKey = tuple[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class RemoteRank:
    """One rank of a producer."""

    boot_id: str
    shape: ParallelShape
    address: tuple[str, int]
    source: ShardSource
    """The part of its KV that this consumer rank needs."""
    key: str = field(default="", repr=False)
    """Of the producer, see `Handoff.key`."""


def find_remote_ranks(kv: RegisteredKv, handoff: Handoff) -> tuple[RemoteRank, ...]:
    """Return all ranks to contact, including those that are only notified that they are not read.
    Raises RefusedError when the handoff's parallelism is invalid."""
    shape, heads = handoff.shape, kv.layout.num_kv_heads
    fault = shape.find_fault(heads)
    if not fault and shape.num_ranks != len(handoff.addresses):
        fault = f"{len(handoff.addresses)} addresses for {shape.num_ranks} ranks"
    if fault:
        raise RefusedError(RefusalReason.LAYOUT, fault)
    return tuple(
        RemoteRank(handoff.boot_id, shape, handoff.addresses[source.rank], source, handoff.key)
        for source in find_sources(kv.shard.shape, kv.shard.rank, shape, heads)
    )


class RankResolver:
    """Addresses and parallelism of producers, cached by boot."""

    def __init__(self) -> None:
        self._ranks_by_boot: OrderedDict[_BootKey, protocol.RanksResponse] = OrderedDict()
        self._lock = threading.Lock()

    def resolve(self, handoff: Handoff, seconds: float) -> Handoff:
        """Return the handoff with all ranks of its producer; it has them already after the prefill.
        Each network operation may take `seconds`. Raises RefusedError."""
        if not handoff.is_overlapped:
            return handoff
        key = (handoff.boot_id, handoff.addresses)
        with self._lock:
            ranks = self._ranks_by_boot.get(key)
        if ranks is None:
            ranks = _request_ranks(handoff, seconds)
            with self._lock:
                self._ranks_by_boot[key] = ranks
                while len(self._ranks_by_boot) > _MAX_BOOTS:
                    self._ranks_by_boot.popitem(last=False)
        return msgspec.structs.replace(handoff, shape=ranks.shape, addresses=ranks.addresses)


def _request_ranks(handoff: Handoff, seconds: float) -> protocol.RanksResponse:
    if not handoff.addresses:
        raise RefusedError(RefusalReason.LAYOUT, "the handoff has no address")
    request = protocol.RanksRequest(handoff.boot_id)
    with closing(connect_authenticated(handoff.addresses[0], handoff.key, seconds)) as connection:
        return protocol.send_request(connection, request, protocol.RanksResponse, seconds)
