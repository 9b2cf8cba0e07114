"""Looks up the addresses of all ranks of a producer for handoffs that were made before the prefill.

For an overlapped prefill the gateway knows only the address of the producer's rank 0, which knows
the other ranks and the parallelism. It is queried once per boot.
"""

import threading
from collections import OrderedDict

import msgspec

from cleave_worker.transfer import protocol
from cleave_worker.transfer.handoff import Handoff, RefusalReason, RefusedError
from cleave_worker.transfer.requests import connect, send_request

_MAX_BOOTS = 256
_BootKey = tuple[str, tuple[tuple[str, int], ...]]


class RankResolver:
    """Addresses and parallelism of producers, cached by boot."""

    def __init__(self) -> None:
        self._ranks_by_boot: OrderedDict[_BootKey, protocol.RanksResponse] = OrderedDict()
        self._lock = threading.Lock()

    def resolve(self, handoff: Handoff, seconds: float) -> Handoff:
        """Return the handoff with all ranks of its producer; it has them already after the prefill.

        Each network operation may take `seconds`. Raises RefusedError.
        """
        if not handoff.is_overlapped:
            return handoff
        key = (handoff.boot_id, handoff.addresses)
        with self._lock:
            ranks = self._ranks_by_boot.get(key)
        if ranks is None:
            ranks = _request_ranks(handoff, seconds)
            self._store(key, ranks)
        return msgspec.structs.replace(handoff, shape=ranks.shape, addresses=ranks.addresses)

    def _store(self, key: _BootKey, ranks: protocol.RanksResponse) -> None:
        with self._lock:
            self._ranks_by_boot[key] = ranks
            while len(self._ranks_by_boot) > _MAX_BOOTS:
                self._ranks_by_boot.popitem(last=False)


def _request_ranks(handoff: Handoff, seconds: float) -> protocol.RanksResponse:
    if not handoff.addresses:
        raise RefusedError(RefusalReason.LAYOUT, "the handoff has no address")
    connection = connect(handoff.addresses[0], seconds)
    try:
        return send_request(
            connection, protocol.RanksRequest(handoff.boot_id), protocol.RanksResponse, seconds
        )
    finally:
        connection.close()
