"""Looks up the addresses of all ranks of a producer for handoffs that were made before the prefill.

For an overlapped prefill the gateway knows only the address of the producer's rank 0, which knows
the other ranks and the parallelism. It is asked once per boot.
"""

import threading
from collections import OrderedDict

import msgspec

from cleave_worker.transfer import protocol
from cleave_worker.transfer.asking import dial, exchange
from cleave_worker.transfer.handoff import HandOff, Reason, RefusedError

_MAX_BOOTS = 256
_Named = tuple[str, tuple[tuple[str, int], ...]]


class Places:
    """Addresses and parallelism of producers, cached by boot."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Named, protocol.Located] = OrderedDict()
        self._lock = threading.Lock()

    def complete(self, handoff: HandOff, seconds: float) -> HandOff:
        """Return the handoff with all ranks of its producer; it has them already after the prefill.

        Each network operation may take `seconds`. Raises RefusedError.
        """
        if not handoff.ahead:
            return handoff
        key = (handoff.boot_id, handoff.addresses)
        with self._lock:
            ranks = self._known.get(key)
        if ranks is None:
            ranks = _ask(handoff, seconds)
            self._keep(key, ranks)
        return msgspec.structs.replace(handoff, shape=ranks.shape, addresses=ranks.addresses)

    def _keep(self, key: _Named, ranks: protocol.Located) -> None:
        with self._lock:
            self._known[key] = ranks
            while len(self._known) > _MAX_BOOTS:
                self._known.popitem(last=False)


def _ask(handoff: HandOff, seconds: float) -> protocol.Located:
    if not handoff.addresses:
        raise RefusedError(Reason.LAYOUT, "the handoff has no address")
    connection = dial(handoff.addresses[0], seconds)
    try:
        return exchange(connection, protocol.Locate(handoff.boot_id), protocol.Located, seconds)
    finally:
        connection.close()
